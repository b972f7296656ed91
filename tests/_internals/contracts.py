"""What tests say of the names that they hold contracts of."""


def holds(owner, *names):
    """Marks a test as the contract of some names.

    Args:
        owner: What has them, as in the table, or the end of that.
        *names: The names.
    """

    def mark(test):
        test.contracts = [
            *getattr(test, "contracts", ()),
            *((owner, name) for name in names),
        ]
        return test

    return mark


def recording(kind, names, calls):
    """A subclass that adds the names of methods to a list when they are called.

    Args:
        kind: The class.
        names: The methods, properties among them.
        calls: The list.
    """

    def recorded(name, found):
        if isinstance(found, property):

            def get(self):
                calls.append(name)
                return found.fget(self)

            return property(get)

        def call(self, *args, **kwargs):
            calls.append(name)
            return found(self, *args, **kwargs)

        return call

    members = {name: recorded(name, getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), members)
