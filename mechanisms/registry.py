"""All mechanisms by id. Importing this loads no torch."""

from specpilot.errors import NotFound
from specpilot.mechanisms.base import Mechanism
from specpilot.mechanisms.trees.mechanism import BEST_FIRST_TREE
from specpilot.mechanisms.trees.selector import PAIRWISE_SELECTOR
from specpilot.mechanisms.w12.mechanism import W12

__all__ = ["all_mechanisms", "get"]

_MECHANISMS = {m.id: m for m in (BEST_FIRST_TREE, PAIRWISE_SELECTOR, W12)}


def all_mechanisms() -> tuple[Mechanism, ...]:
    """Return every mechanism, in order of id."""
    return tuple(_MECHANISMS[name] for name in sorted(_MECHANISMS))


def get(mechanism_id: str) -> Mechanism:
    """Return one mechanism. Raises ``NotFound`` listing what exists."""
    try:
        return _MECHANISMS[mechanism_id]
    except KeyError:
        raise NotFound(
            f"there is no mechanism {mechanism_id!r}.",
            hint=f"There are: {', '.join(sorted(_MECHANISMS))}.",
        ) from None
