"""The tokenizers of a pair of folders, checked; the engine itself reads and writes ids alone."""

from pathlib import Path

from tokenizers import Tokenizer

from specpilot.errors import InvalidInput

__all__ = ["check_tokenizers"]


def check_tokenizers(target: Path, drafter: Path | None, vocab_size: int) -> None:
    """Raise ``InvalidInput`` where a tokenizer does not fit the target, or the drafter's differs.

    A folder without ``tokenizer.json`` has nothing to check.
    """
    mine = _vocabulary(target)
    if mine and max(mine.values()) >= vocab_size:
        raise InvalidInput(
            f"{target / 'tokenizer.json'} has ids up to {max(mine.values())}, "
            f"the target's vocabulary is {vocab_size}."
        )
    theirs = _vocabulary(drafter) if drafter is not None else {}
    if mine and theirs and mine != theirs:
        raise InvalidInput(
            f"{drafter} and {target} have different tokenizers.",
            hint="Give the drafter that was trained on this target.",
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidInput(f"{path} cannot be read: {error}.") from error
    return vocabulary
