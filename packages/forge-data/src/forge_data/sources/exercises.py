"""Small exercises that are generated: a task, a word, and its solution, for examples and demonstrations of fine-tuning.

    Reverse plum:  -> mulp      Capitalize plum:  -> PLUM
    Double plum:  -> plumplum   Rotate plum:  -> lump

Words are random letters, and no exercise occurs twice, so a held-out exercise cannot be known by heart. The records are a pure
function of kind, number and seed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from string import ascii_lowercase

from forge_core.errors import DataError
from forge_core.files import replace_file

TASKS: Mapping[str, Callable[[str], str]] = {
    "Reverse": lambda word: word[::-1],
    "Capitalize": str.upper,
    "Double": lambda word: word * 2,
    "Rotate": lambda word: word[1:] + word[0],
}
"""Name of a task -> the solution of a word."""
SHORTEST = 2
"""Minimum number of letters of a word."""


def most(letters: int, tasks: int) -> int:
    """Returns the maximum number of exercises: a third of all with words of up to `letters` letters, so that drawing is fast."""
    return tasks * sum(len(ascii_lowercase) ** size for size in range(SHORTEST, letters + 1)) // 3


def exercises(count: int, letters: int, seed: int, tasks: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yields (prompt, solution, wrong solution) of `count` different exercises with words of up to `letters` letters.

    A wrong solution is that of another one of `tasks`, or of another word.
    """
    draw, seen, names = Random(seed), set[str](), list(tasks)
    while len(seen) < count:
        task = draw.choice(names)
        word = _word(draw, letters)
        prompt = f"{task} {word}: "
        if prompt in seen:
            continue
        right = TASKS[task](word)
        others = [name for name in names if name != task]
        wrong = TASKS[draw.choice(others)](word) if others else TASKS[task](_word(draw, letters))
        if others and draw.random() >= 0.5:
            wrong = TASKS[task](_word(draw, letters))
        if wrong == right:
            continue
        seen.add(prompt)
        yield prompt, right, wrong


def labeled_exercises(count: int, letters: int, seed: int, tasks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (text, task) of `count` different exercises, such as ("plum: mulp", "Reverse"). A word whose solution is that of
    several `tasks`, such as a palindrome, is left out."""
    draw, seen, names = Random(seed), set[str](), list(tasks)
    while len(seen) < count:
        task = draw.choice(names)
        word = _word(draw, letters)
        solution = TASKS[task](word)
        text = f"{word}: {solution}"
        if text in seen or any(TASKS[name](word) == solution for name in names if name != task):
            continue
        seen.add(text)
        yield text, task


def _word(draw: Random, letters: int) -> str:
    sizes = draw.randint(SHORTEST, letters), draw.randint(SHORTEST, letters)
    return "".join(draw.choice(ascii_lowercase) for _ in range(max(sizes)))  # there are more long words


def write_exercises(folder: Path, pairs: bool, count: int, letters: int, seed: int, tasks: Sequence[str]) -> str:
    """Writes the records into a folder, unless they are there, and returns the path of the file.

    Args:
        folder: the folder; it is created.
        pairs: whether records are preference pairs of the right and a wrong solution, instead of a prompt and its solution.
        count: number of records.
        letters: maximum number of letters of a word.
        seed: seed of the records.
        tasks: names of tasks, each once.

    Raises:
        DataError: a task is not known, there are too few words, or the file cannot be written.
    """
    _check(count, letters, tasks)
    path = folder / f"exercises-{'pairs' if pairs else 'solutions'}-{count}-{letters}-{seed}-{'-'.join(tasks)}.jsonl"
    if path.is_file():
        return str(path)
    records = (
        {"prompt": prompt, "chosen": right, "rejected": wrong} if pairs else {"prompt": prompt, "completion": right}
        for prompt, right, wrong in exercises(count, letters, seed, tasks)
    )
    return _written(path, records)


def write_labeled(folder: Path, count: int, letters: int, seed: int, tasks: Sequence[str]) -> str:
    """Writes labeled exercises into a folder, unless they are there, and returns the path of the file; see `write_exercises`."""
    _check(count, letters, tasks)
    path = folder / f"exercises-labeled-{count}-{letters}-{seed}-{'-'.join(tasks)}.jsonl"
    if path.is_file():
        return str(path)
    return _written(path, ({"text": text, "label": task} for text, task in labeled_exercises(count, letters, seed, tasks)))


def _check(count: int, letters: int, tasks: Sequence[str]) -> None:
    if unknown := [name for name in tasks if name not in TASKS]:
        raise DataError(f"task {unknown[0]!r} is not known; known are {', '.join(TASKS)}")
    if count > most(letters, len(tasks)):
        raise DataError(f"there are not {count} exercises with words of up to {letters} letters; lower count, or raise letters")


def _written(path: Path, records: Iterable[Mapping[str, str]]) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; make room or choose another workspace") from error
    return str(path)
