"""How to decode: the tree of drafts, how they are made, the sampling policy, the acceptance rule,
and what all that guarantees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drafttrain.decoding import rules
from drafttrain.errors import InputError
from drafttrain.flow import Sampling
from drafttrain.later import torch
from drafttrain.nn.sampling import Policy
from drafttrain.tree.topology import Growth

if TYPE_CHECKING:
    from drafttrain.drafter.base import Drafter
    from drafttrain.target.model import Target

TUNED = ", relative to the tuned target"
"""What a guarantee adds where training changed the target too."""
UNKEPT = "none, the text differed"
"""In the place of a guarantee that was seen not to hold."""


DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_dtype(name: object) -> None:
    """Raises: InputError for a dtype that no drafter decodes in."""
    if name not in DTYPES:
        raise InputError(f"dtype={name}: give one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Plan:
    """How to decode: the shape of a proposal, how its drafts are drawn, and the rule."""

    tree: Growth
    """How the tree of drafts grows, and its budget; Tree.chain(0) is plain decoding."""
    policy: Policy = Policy()
    sampled: bool | None = None
    """Draw drafts from q (True) or take the top-k (False); None does what suits the rule, and
    without a rule draws them whenever the temperature is above 0."""
    rule: str | None = None
    """Name of an acceptance rule; None is the exact one that fits the proposal."""

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn; otherwise they are a function of the text."""
        return self.sampling is not Sampling.ONE_HOT

    @property
    def sampling(self) -> Sampling:
        """How drafts are made. A drawn chain counts as independent draws: each node has one
        child."""
        if self.policy.greedy:
            if self.sampled:
                raise InputError(
                    "sampled=true needs a temperature above 0: at temperature 0 there is nothing "
                    "to draw from"
                )
            return Sampling.ONE_HOT
        if self.sampled and not self.tree.can_draw:
            raise InputError(
                f"sampled=true does not go with a {self.tree.kind} tree: which of its nodes stay "
                "depends on their tokens, so drawn ones would change the distribution of the "
                "text; leave it out, or give a static tree"
            )
        drawn: tuple[Sampling, ...] = ()
        if self.tree.can_draw:
            drawn = (Sampling.IID,) if self.tree.is_chain else (Sampling.WOR, Sampling.IID)
        possible = {None: (*drawn, Sampling.ONE_HOT), True: drawn, False: (Sampling.ONE_HOT,)}[
            self.sampled
        ]
        if self.rule is None:
            return possible[0]
        for sampling in rules.scope_of(self.rule).samplings:
            if sampling in possible:
                return sampling
        if not self.tree.can_draw:
            raise InputError(
                f"rule {self.rule} judges drawn drafts, a {self.tree.kind} tree takes the most "
                "likely ones: give rule=auto, or a static tree"
            )
        others = "" if self.sampled else " (a drafter that copies text makes no others)"
        raise InputError(
            f"rule {self.rule} does not fit sampled={str(self.sampled).lower()}, which makes "
            f"{possible[0].value} drafts{others}: leave one of the two out"
        )

    def made_by(self, drafter: Drafter | None) -> Plan:
        """The same plan as this drafter carries it out: its tree, and drafts made as it can make
        them. Raises InputError if none is as asked for."""
        if drafter is None or not self.tree.size:
            return self
        plan = replace(self, tree=drafter.shaped(self.tree))
        if drafter.can_draw:
            return plan
        if self.sampled:
            raise InputError(
                f"sampled=true: {type(drafter).__name__} copies its drafts and draws none, leave "
                "it out"
            )
        return replace(plan, sampled=False)

    @property
    def rule_name(self) -> str:
        """The rule asked for, or the exact one that fits. Raises InputError for one that serves
        neither temperature nor tree."""
        sampling = self.sampling
        if self.rule is None:
            return rules.rule_for(sampling, self.policy.greedy, self.tree.is_chain)
        rules.check_fit(self.rule, greedy=self.policy.greedy, is_chain=self.tree.is_chain)
        return self.rule

    @property
    def misfit(self) -> str | None:
        """Why the rule cannot serve this temperature or tree; None where it can."""
        try:
            _ = self.rule_name
        except InputError as error:
            return str(error)
        return None

    def facts(self) -> dict[str, Any]:
        """What a measured row says of it; plain JSON values."""
        return {
            "temperature": self.policy.temperature,
            "top_k": self.policy.top_k,
            "top_p": self.policy.top_p,
            "growth": self.tree.kind,
            "tree": self.tree.title,
            "nodes": self.tree.size,
            "depth": self.tree.max_depth,
            "rule": self.rule_name,
        }

    @property
    def guarantee(self) -> str:
        """Relative to the target used: "greedy" (same tokens), "distribution" (the same one) or
        "approximate" (neither)."""
        if not self.tree.size:
            return "greedy" if self.policy.greedy else "distribution"
        return rules.guarantee_of(self.rule_name)

    def guarantee_on(self, target: Target, *, differed: bool = False) -> str:
        """The guarantee as people read it: a tuned target is not the original.

        Args:
            differed: greedy text was another than plain decoding's. In float32 that is no rounding:
                nothing is promised then.
        """
        wide = target.dtype in (torch.float32, torch.float64)
        if differed and wide and self.guarantee == "greedy":
            return UNKEPT
        return self.guarantee if target.adapter is None else self.guarantee + TUNED
