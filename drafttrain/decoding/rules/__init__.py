"""Acceptance rules: which drafted tokens stay, and which token follows them.

Pure functions of the target's probabilities, the proposal and uniform numbers: the same input gives
the same answer, and a row's answer does not depend on the other rows. A rule is exact only for
drafts that were made in the way it expects (`Sampling`), so each checks that first.

    rule              judges                                   file
    greedy            any proposal, at temperature 0           match
    sample_and_match  any proposal                             match
    ratio             a chain drawn from q                     chain
    block             a chain drawn from q                     chain
    multi_step        a tree drawn from q, or from several     tree
    one_hot           a tree or chain of most likely tokens    tree
    k_seq             a tree of independent siblings           spectr
    typical           any proposal; not exact                  approximate

What all rules share, but for greedy, which reads only argmaxes:
    p: (b n+1 v) target probabilities after the sampling policy; row 0 follows the anchor, row i+1
        follows node i.
    u: (b n+1) uniform numbers in [0, 1). u[:, n] draws the token that follows the accepted ones;
        each rule says what it uses the others for. A row reads only its own numbers, in places that
        do not depend on the tokens.
    A token stays if u < ratio, strictly: at u = 0 a token of target probability 0 is still refused.
    Siblings are judged in index order; the order must not depend on the drawn tokens.
    `path` of the answer is as wide as the deepest node of the batch (a chain's length), padded with
    -1. Arithmetic is float64 on one (b v) residual; p and q are read row by row and never copied
    in full. Raises InputError if the rule does not fit the proposal or shapes disagree, ValueError
    if a drafted token has q = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from drafttrain.decoding.rules.approximate import DELTA, EPSILON, check_thresholds, typical
from drafttrain.decoding.rules.chain import block, ratio
from drafttrain.decoding.rules.match import greedy, sample_and_match
from drafttrain.decoding.rules.spectr import k_seq
from drafttrain.decoding.rules.tree import multi_step, one_hot
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Sampling

RULES: dict[str, Callable[..., Acceptance]] = {
    "greedy": greedy,
    "ratio": ratio,
    "block": block,
    "multi_step": multi_step,
    "one_hot": one_hot,
    "k_seq": k_seq,
    "sample_and_match": sample_and_match,
    "typical": typical,
}

GUARANTEES: dict[str, str] = {
    "greedy": "greedy",
    "ratio": "distribution",
    "block": "distribution",
    "multi_step": "distribution",
    "one_hot": "distribution",
    "k_seq": "distribution",
    "sample_and_match": "distribution",
    "typical": "approximate",
}
"""What each rule keeps of the target used: "greedy" the ids of greedy decoding, "distribution" the
distribution of sampling, "approximate" neither."""


@dataclass(frozen=True)
class Scope:
    """What a rule can judge."""

    samplings: tuple[Sampling, ...]
    """The one it accepts most drafts of comes first: drafts are made so unless a plan says
    otherwise."""
    chain: bool = False
    """Each node must be the only child of the one before."""


_ANY = (Sampling.ONE_HOT, Sampling.WOR, Sampling.IID, Sampling.UNKNOWN)
SCOPES: dict[str, Scope] = {
    "greedy": Scope(_ANY),
    "ratio": Scope((Sampling.IID,), chain=True),
    "block": Scope((Sampling.IID,), chain=True),
    "multi_step": Scope((Sampling.WOR, Sampling.IID)),
    "one_hot": Scope((Sampling.ONE_HOT,)),
    "k_seq": Scope((Sampling.IID,)),
    "sample_and_match": Scope(_ANY),
    "typical": Scope(_ANY),
}


def named(name: str) -> Callable[..., Acceptance]:
    """The rule of a name; `typical:0.2:0.5` is typical with its epsilon and delta.

    Raises: InputError for any other name.
    """
    base, *numbers = name.split(":")
    if base not in RULES:
        raise InputError(f"rule {name[:80]} is not known: give auto or one of {', '.join(RULES)}")
    if not numbers:
        return RULES[base]
    try:
        epsilon, delta = map(float, numbers)
    except ValueError:
        base = ""
    if base != "typical":
        raise InputError(
            f"rule {name[:80]} is not known: only typical takes numbers, its epsilon and delta, as "
            f"in typical:{EPSILON}:{DELTA}"
        )
    check_thresholds(epsilon, delta)
    return partial(RULES[base], epsilon=epsilon, delta=delta)


def scope_of(name: str) -> Scope:
    """What the rule of a name can judge. Raises InputError as `named` does."""
    named(name)
    return SCOPES[name.partition(":")[0]]


def guarantee_of(name: str) -> str:
    """What the rule of a name keeps, see GUARANTEES. Raises InputError as `named` does."""
    named(name)
    return GUARANTEES[name.partition(":")[0]]


def rule_for(sampling: Sampling, greedy: bool, is_chain: bool) -> str:
    """Name of the exact rule that fits a proposal and keeps the most of it, by how its drafts were
    made, whether decoding is greedy, and whether each node has one child."""
    if greedy:
        return "greedy"
    if sampling is Sampling.IID and is_chain:
        return "block"
    if sampling in (Sampling.IID, Sampling.WOR):
        return "multi_step"
    return "one_hot" if sampling is Sampling.ONE_HOT else "sample_and_match"


def check_fit(name: str, *, greedy: bool, is_chain: bool) -> None:
    """Refuse a rule that cannot serve this temperature or shape, however the drafts are made.

    Raises: InputError saying why, and what to give instead.
    """
    scope = scope_of(name)
    if greedy and name != "greedy":
        raise InputError(
            f"rule {name} judges sampled text, at temperature 0 the rule is greedy: give a "
            "temperature above 0, or rule=auto"
        )
    if name == "greedy" and not greedy:
        raise InputError(
            "rule greedy follows the target's argmax: give temperature 0, or rule=auto"
        )
    if scope.chain and not is_chain:
        raise InputError(
            f"rule {name} judges a chain, this tree has nodes with several children: give a chain "
            "such as tree=4, or rule=auto"
        )
