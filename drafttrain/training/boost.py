"""SpecInfer's collective boost-tuning (Miao et al. 2023, arXiv:2305.09781, section 3): several
small models, each fitted on what the earlier ones do not match yet, so that together they cover
more of the target's text.

    R_1 = all rows;  fit model s on R_s;  mark the rows of R_s whose reference it reproduces;
    R_{s+1} = R_s without these

A row's reference is what the target writes greedily after the row's first prompt, an end token
counted. It is matched up to the first token that the model would write otherwise. Teacher-forced
guesses show that token, since both texts are the same up to there.

The paper does not say how long references are, how many models there are, where they start, which
rows are marked by which model, and when to stop: `Boost` settles that. It generalises twice: rows
can count less the more of them is matched, and single tokens can count as much as the earlier
models' distributions miss of the target's. The procedure: `drafttrain.training.tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafttrain.checks import integer, number
from drafttrain.errors import InputError
from drafttrain.tree.choice import SHARING

if TYPE_CHECKING:
    from drafttrain.drafter.base import Drafter

MARKING = ("cross_fitted", "held_out", "fitted")
REMOVAL = ("hard", "soft", "token")
BEGIN = ("fresh", "previous")


@dataclass(frozen=True, kw_only=True)
class Boost:
    """How the models are fitted one after the other, and what they share at the end."""

    members: int
    """Models at most. The cost of checking grows with every one, and each adds less than the one
    before."""
    reference: int
    """n, the tokens of a reference; fewer where the target's answer ends."""
    match: int | None
    """m, the first tokens that must be alike for a row to count as covered; None is all n. With a
    share a of right tokens a match has a probability of about a^m: where no row is covered, the
    next model learns the same as this one."""
    marking: str
    """Which model marks a row. cross_fitted: one that was fitted without the row, as all are in
    `folds` parts. held_out: each model is fitted on half of what is left and marks the other half,
    and the next is fitted on what is left of that; the last takes all. fitted: the model itself,
    also where it knows a row by heart."""
    folds: int
    """Parts of `cross_fitted`, and as many further fits for each model but the last."""
    removal: str
    """hard: a covered row is taken away for good, as in the paper. soft: a row's weight is
    multiplied by exp(-eta x the share of its reference that was matched). token: a label weighs 1 -
    max over the models so far of sum_v min(p, q), its refusals."""
    eta: float
    """Of soft: the larger, the nearer to hard."""
    begin: str
    """fresh: every model starts with the same weights (a new network with those of its own seed).
    previous: with those of the model before it, whose blind spots it then inherits."""
    least_left: float
    """No further model is fitted once the rows that are left weigh less than this share of all
    rows."""
    least_gain: float
    """A model that raises the share of rows covered by any model by less than this is left out, and
    is the last."""
    nodes: int | None
    """Drafts that the members share, by what each adds on rows set aside (data.set_aside); each
    single member with as many is measured too. None: each member grows the configuration's
    tree."""
    share_new_tokens: int
    """Tokens decoded after each prompt of these rows, to see what each member adds."""

    def __post_init__(self) -> None:
        least = {
            "members": 1,
            "reference": 1,
            "folds": 2,
            "share_new_tokens": SHARING.max_depth + 2,
        }
        for name, low in least.items():
            integer(f"boost.{name}", getattr(self, name), low)
        integer("boost.match", self.match, 1, null="all of the reference")
        integer("boost.nodes", self.nodes, 1, null="a tree for each member")
        if self.match is not None and self.match > self.reference:
            raise InputError(
                f"boost.match={self.match} is above boost.reference={self.reference}, the tokens "
                "of a reference"
            )
        for name, known in (("marking", MARKING), ("removal", REMOVAL), ("begin", BEGIN)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"boost.{name}={getattr(self, name)}: give one of {', '.join(known)}"
                )
        number("boost.eta", self.eta)
        for name in ("least_left", "least_gain"):
            number(f"boost.{name}", getattr(self, name))
            if getattr(self, name) > 1:
                raise InputError(f"boost.{name}={getattr(self, name)}: needs a share, at most 1")

    def check_kind(self, kind: type[Drafter]) -> None:
        """Raise InputError if drafters of this class cannot be fitted so."""
        _refuse_silent(kind)

    def check(self, drafter: Drafter) -> None:
        """Raise InputError if such drafters cannot be fitted so."""
        _refuse_silent(type(drafter))
        if self.removal != "token":
            return
        if not drafter.needs.last_hidden:
            raise InputError(
                "boost.removal=token compares distributions, and this drafter's loss reads only "
                "the text: give the loss a divergence, or removal=hard or soft"
            )
        if drafter.settings().get("on_policy"):
            raise InputError(
                "boost.removal=token weighs the set's tokens, with drafter.on_policy others are "
                "learned: set it to 0, or removal=hard or soft"
            )


def _refuse_silent(kind: type[Drafter]) -> None:
    """Raise InputError for drafters that write no text by themselves."""
    from drafttrain.drafter.standalone import Standalone

    if not issubclass(kind, Standalone):
        raise InputError(
            f"boost: {kind.__name__} is no language model that could match a text by itself: give "
            "drafter=ssm, or boost=null"
        )
