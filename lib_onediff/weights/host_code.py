"""Decides whether a network's code can be served: which functions other code has replaced, and how often the code
changes."""
from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from ..core.origins import package
from ..core.refusal import Refusal
from .module_tree import Tree
from .reached import Reached
from .scan import HostTraits, foreign_parts, has_unseen_state, reason_of, refuse_foreign_code, replaced_names

# The number of digests of a network's code that are remembered.
MOST_MET = 64
# The number of unknown digests in a row after which the network is refused: each new one costs a check against the
# host.
MOST_NEW = 8


class HostCode:
    """The code that one network runs, over time. BoundNetwork gives it each Tree that it reads. Keeps no module alive.

    replaced: for each function that the network calls and that other code has replaced: a sentence for users with the
        function and the author. As of the last check().
    changes: how often code that our own operators depend on, such as torch's functions, was found changed.
    """

    def __init__(self) -> None:
        self.replaced: tuple[str, ...] = ()
        self.changes = 0
        # Reached.facts of the code when the network was first read.
        self._first: dict[str, str] | None = None
        # The code that was searched for replaced functions last, with the packages that were known to be the host's;
        # and the reason to refuse it, "" if there is none.
        self._judged: tuple[Reached, Collection[str], Collection[str]] | None = None
        self._unseen = ""
        # Reached.facts_of_ours at the last note().
        self._facts_of_ours: Mapping[str, str] = {}
        # The digests of the code so far, and the number of new ones in a row.
        self._met: dict[str, None] = {}
        self._new_ones = 0

    def check(self, network: nn.Module, tree: Tree, host_traits: HostTraits) -> None:
        """Set `replaced`. Raises Refusal, with the reason, if a module may compute something else than its class's
        original code (scan.refuse_foreign_code; `replaced` then stays), or if the result of a replaced function may
        depend on state that OneDiff cannot compare, so that a check of one call proves nothing for the next.

        network: as it is now. tree: made of it now. host_traits: say which code is the host's own.
        """
        refuse_foreign_code(network, host_traits)
        judged = tree.reached, tree.hosts, host_traits.trusted
        if judged != self._judged:
            self._find_replaced(tree, host_traits.trusted)
            self._judged = judged
        if self._unseen:
            raise Refusal(f"{self._unseen}, and OneDiff cannot see on what its result depends")

    def _find_replaced(self, tree: Tree, trusted: Collection[str]) -> None:
        """Set `replaced`, and _unseen to a sentence about the first replaced function with state that cannot be
        compared; "" if there is none. trusted: see HostTraits."""
        reached = tree.reached
        if self._first is None:
            self._first = reached.facts
        found = replaced_names(reached, tree.hosts, self._first, trusted)
        known = {*trusted, *map(package, trusted), *tree.hosts}
        foreign = (one for one in found if foreign_parts(one, known))
        self.replaced = tuple(dict.fromkeys(map(reason_of, found)))
        self._unseen = next((reason_of(one) for one in foreign if has_unseen_state(one, tree.hosts)), "")

    def note(self, reached: Reached) -> bool:
        """Note that the code was read anew, and is this now. Returns whether code that our own operators depend on has
        changed since the last call, so that graphs and copies of weights are invalid; False at the first call."""
        self._new_ones = 0 if reached.digest in self._met else self._new_ones + 1
        self._met[reached.digest] = None
        while len(self._met) > MOST_MET:
            del self._met[next(iter(self._met))]
        # Our operators call torch's functions by name. Graphs and copies of weights contain results of the old ones.
        facts = reached.facts_of_ours
        has_changed = bool(self._facts_of_ours) and facts != self._facts_of_ours
        self._facts_of_ours = facts
        self.changes += int(has_changed)
        return has_changed

    def note_unchanged(self) -> None:
        """Note that a call has found the code unchanged: it is not new at every step."""
        self._new_ones = 0

    def refuse_if_always_new(self) -> None:
        """Raise Refusal if the code was new in more than MOST_NEW calls in a row: each change needs a check against the
        host, which takes longer than the host alone."""
        if self._new_ones > MOST_NEW:
            what = self.replaced[0] if self.replaced else "the model's code was changed"
            raise Refusal(f"{what}; it is new at every step, and OneDiff would have to check its result each time")
