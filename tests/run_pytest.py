"""The program of every `py_test`: pytest, on the file given as argument."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
