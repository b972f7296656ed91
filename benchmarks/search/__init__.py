"""Groups of devices that search, against one."""
