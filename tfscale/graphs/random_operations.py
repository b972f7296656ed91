"""Operations of TensorFlow that draw random numbers, in one table."""

# These draw from a `tf.random.Generator`, those below from hidden state.
_OF_GENERATORS = (
    *("RngReadAndSkip", "RngSkip", "StatefulRandomBinomial"),
    *("StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform"),
)
_OF_STATE = (
    *("FixedUnigramCandidate", "FractionalAvgPool", "FractionalMaxPool"),
    *("LearnedUnigramCandidate", "LogUniformCandidate", "Multinomial"),
    *("NonDeterministicInts", "ParameterizedTruncatedNormal", "RandomGamma"),
    *("RandomPoisson", "RandomShuffle", "RandomStandardNormal"),
    *("RandomUniform", "SampleDistortedBoundingBox", "TruncatedNormal"),
    "UniformCandidate",
)
# Draw from a seed; beside control flow, nothing else has this prefix.
_SEEDED = "Stateless"
_CONTROL_FLOW = ("StatelessCase", "StatelessIf", "StatelessWhile")
# Each element is drawn separately.
ELEMENTWISE = frozenset(
    (
        *("RandomStandardNormal", "RandomUniform", "TruncatedNormal"),
        *("StatelessRandomNormal", "StatelessRandomNormalV2"),
        *("StatelessRandomUniform", "StatelessRandomUniformV2"),
        *("StatelessTruncatedNormal", "StatelessTruncatedNormalV2"),
    )
)


def draws_from_generator(op: str) -> bool:
    """Whether a type of operation draws from a `tf.random.Generator`."""
    return op.startswith(_OF_GENERATORS)


def draws_from_state(op: str) -> bool:
    """Whether a type of operation draws from a state that it changes."""
    is_drawn = op.startswith((*_OF_GENERATORS, *_OF_STATE))
    return is_drawn and not op.endswith("Grad")


def draws_from_seed(op: str) -> bool:
    """Whether a type of operation draws from a seed that it is given."""
    return op.startswith(_SEEDED) and op not in _CONTROL_FLOW
