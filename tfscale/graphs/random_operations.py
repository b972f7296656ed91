"""Operations of TensorFlow that draw random numbers, in one table."""

_OF_STATE = (
    # Of a `tf.random.Generator`.
    *("RngReadAndSkip", "RngSkip", "StatefulRandomBinomial"),
    *("StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform"),
    # Hidden.
    *("FixedUnigramCandidate", "FractionalAvgPool", "FractionalMaxPool"),
    *("LearnedUnigramCandidate", "LogUniformCandidate", "Multinomial"),
    *("NonDeterministicInts", "ParameterizedTruncatedNormal", "RandomCrop"),
    *("RandomGamma", "RandomPoisson", "RandomShuffle", "RandomStandardNormal"),
    *("RandomUniform", "SampleDistortedBoundingBox"),
    *("ThreadUnsafeUnigramCandidate", "TruncatedNormal", "UniformCandidate"),
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


def draws_from_state(op: str) -> bool:
    """Whether a type of operation draws from a state that it changes."""
    return op.startswith(_OF_STATE) and not op.endswith("Grad")


def draws_from_seed(op: str) -> bool:
    """Whether a type of operation draws from a seed that it is given."""
    return op.startswith(_SEEDED) and op not in _CONTROL_FLOW
