"""Questions whose answers are words of a passage: built in, or of SQuAD.

The built-in ones are about one name each, as the book's "Packt is a publisher",
"Who is Packt ?". SQuAD (Rajpurkar et al., 2016 and 2018) is a JSON file.
"""

import json
import random
import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import app

_WORDS = {
    "names": (
        "Packt Ada Alan Barbara Claude Donald Edith Fei Grace Hans Ida John "
        "Katherine Linus Margaret Niklaus Olga Peter Radia Shafi Tim Ursula "
        "Vint Whitfield"
    ),
    "jobs": (
        "publisher baker doctor farmer judge mason nurse painter pilot sailor "
        "singer teacher weaver writer"
    ),
    "places": (
        "Accra Berlin Cairo Delhi Essen Florence Geneva Hanoi Istanbul "
        "Jakarta Kyoto Lima Madrid Nairobi Oslo Paris"
    ),
    "subjects": (
        "art biology chemistry French geology history law logic Latin "
        "mathematics medicine philosophy physics"
    ),
    "things": (
        "apples books bread cheese chess coffee honey maps music rain snow "
        "tea trains"
    ),
}
_NAMES, _JOBS, _PLACES, _SUBJECTS, _THINGS = (
    words.split() for words in _WORDS.values()
)
_YEARS = [str(year) for year in range(1900, 1924)]

# A sentence, the question that it answers, and the words that may answer.
_FACTS = (
    ("{name} is a {answer} .", "Who is {name} ?", _JOBS),
    ("{name} lives in {answer} .", "Where does {name} live ?", _PLACES),
    ("{name} studied {answer} .", "What did {name} study ?", _SUBJECTS),
    ("{name} likes {answer} .", "What does {name} like ?", _THINGS),
    ("{name} was born in {answer} .", "When was {name} born ?", _YEARS),
)


class Question(NamedTuple):
    """A question about a passage.

    Attributes:
        question: Its words.
        passage: The passage's words.
        start: Index of the answer's first word in the passage, or None if it
            has no answer.
        end: Index of its last word, or None.
    """

    question: list[str]
    passage: list[str]
    start: int | None
    end: int | None


def built_in(num_passages: int, seed: int) -> list[Question]:
    """Four questions about each of some passages, of four facts each."""
    generator = random.Random(seed)
    questions = []
    for _ in range(num_passages):
        name = generator.choice(_NAMES)
        sentences, asked = [], []
        for sentence, question, answers in generator.sample(_FACTS, 4):
            answer = generator.choice(answers)
            words = sentence.format(name=name, answer=answer).split()
            begin = sum(map(len, sentences)) + words.index(answer)
            sentences.append(words)
            asked.append((question.format(name=name).split(), begin))
        passage = [word for words in sentences for word in words]
        questions += [Question(q, passage, at, at) for q, at in asked]
    return questions


def vocabulary() -> list[str]:
    """Tokens of the built-in passages, for `keras_hub`'s `BertTokenizer`."""
    texts = [
        text
        for sentence, question, _ in _FACTS
        for text in (sentence, question)
    ]
    words = {word for text in texts for word in text.split() if word[0] != "{"}
    words.update(_NAMES, _JOBS, _PLACES, _SUBJECTS, _THINGS, _YEARS)
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]


def squad(path: str) -> list[Question]:
    """Questions of a file of SQuAD 1.1 or 2.0.

    Raises:
        app.UsageError: If the file cannot be read or has another format.
    """
    try:
        with open(path, encoding="utf-8") as file:
            articles = json.load(file)["data"]
        return [
            _of_squad(entry["question"], paragraph["context"], entry["answers"])
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except OSError as error:
        raise app.UsageError(
            f"--squad={path} cannot be read: {error}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise app.UsageError(
            f"--squad={path} is not in SQuAD's format, 1.1 or 2.0: {error!r}."
        ) from error


def _of_squad(question, context, answers):
    words = list(re.finditer(r"\w+|[^\w\s]", context))
    start = end = None
    if answers:
        first = answers[0]["answer_start"]
        last = first + len(answers[0]["text"]) - 1
        inside = [
            index
            for index, word in enumerate(words)
            if word.end() > first and word.start() <= last
        ]
        if inside:
            start, end = inside[0], inside[-1]
    return Question(
        re.findall(r"\w+|[^\w\s]", question),
        [word.group() for word in words],
        start,
        end,
    )


def encode(
    questions: Sequence[Question],
    tokens_of: Mapping[str, list[int]],
    length: int,
    ids: Mapping[str, int],
):
    """Rows `[CLS] question [SEP] passage [SEP]` for BERT.

    Args:
        questions: The questions.
        tokens_of: Token ids of each word.
        length: Integer, tokens of a row.
        ids: Token ids of "[CLS]", "[SEP]" and "[PAD]".

    Returns:
        A tuple of a dict of int32 arrays of shape `(rows, length)`, a dict of
        int32 arrays "start" and "end" of shape `(rows,)`, which are 0 (the
        token "[CLS]") where there is no answer, and for each row the index in
        the passage of each token's word, -1 outside of it. A question whose
        answer ends after `length` tokens is left out.
    """
    inputs = {"token_ids": [], "segment_ids": [], "padding_mask": []}
    targets = {"start": [], "end": []}
    words_of = []
    for question in questions:
        tokens, words = [ids["[CLS]"]], [-1]
        for pieces in map(tokens_of.get, question.question):
            tokens += pieces
            words += [-1] * len(pieces)
        tokens.append(ids["[SEP]"])
        words.append(-1)
        num_first = len(tokens)
        for index, pieces in enumerate(map(tokens_of.get, question.passage)):
            tokens += pieces
            words += [index] * len(pieces)
        tokens, words = tokens[: length - 1], words[: length - 1]
        tokens.append(ids["[SEP]"])
        words.append(-1)
        start = end = 0
        if question.start is not None:
            if question.start not in words or question.end not in words:
                continue
            start = words.index(question.start)
            end = len(words) - 1 - words[::-1].index(question.end)
        padding = length - len(tokens)
        inputs["token_ids"].append(tokens + [ids["[PAD]"]] * padding)
        inputs["segment_ids"].append(
            [int(at >= num_first) for at in range(len(tokens))] + [0] * padding
        )
        inputs["padding_mask"].append([1] * len(tokens) + [0] * padding)
        targets["start"].append(start)
        targets["end"].append(end)
        words_of.append(words + [-1] * padding)

    def arrays(rows):
        return {name: np.array(row, "int32") for name, row in rows.items()}

    return arrays(inputs), arrays(targets), np.array(words_of)


def best_spans(start, end, words_of, longest: int = 30):
    """First and last token of the best answers, 0 and 0 for none.

    Args:
        start: Array of logits of shape `(rows, length)`.
        end: The same of the last token.
        words_of: Array of that shape, as of `encode`.
        longest: Integer, tokens of the longest answer.
    """
    spans = []
    for first, last, words in zip(start, end, words_of, strict=True):
        inside = words >= 0
        inside[0] = True
        scores = first[:, None] + last[None, :]
        allowed = np.triu(np.tril(np.ones_like(scores), longest - 1)) > 0
        allowed &= inside[:, None] & inside[None, :]
        allowed[0, 1:] = False  # no answer is its own span
        scores = np.where(allowed, scores, -np.inf)
        spans.append(np.unravel_index(np.argmax(scores), scores.shape))
    return np.array(spans)
