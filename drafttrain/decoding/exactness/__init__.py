"""Is the text really the target's own? Greedy text against plain decoding, sampled text against the
target's exact distribution.

Greedy: the same prompts decoded plainly and by a plan, token for token. Where they part, the
target's logits of the two tokens are compared, since in low precision two passes over one text may
order two nearly equal logits differently.

Sampled: Pearson's goodness of fit of the first tokens after a prompt, drawn many times by the
decoding loop, against probabilities that plain passes of the target give. A vocabulary is far too
large for a cell per sequence, so sequences are sorted into cells of at least a known probability
(`Cells`). The statistic is summed over the prompts.

A test that finds nothing says little unless it would have found something. With n draws the
noncentrality is n times sum (r - p)^2 / p, at least 4 n TV(r, p)^2 by Cauchy-Schwarz, whatever the
wrong distribution r: so a power is promised for every difference of a given total variation
distance, in the cells, on average over the prompts. A decoder known to be wrong, which keeps every
draft, is tested next to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drafttrain.decoding.draws import check_draws
from drafttrain.decoding.exactness.cells import TOKENS
from drafttrain.decoding.exactness.distribution import same_distribution
from drafttrain.decoding.exactness.greedy import same_text
from drafttrain.decoding.exactness.verdict import FALSE_ALARM, judged, words
from drafttrain.decoding.measure import Prompts, Watch, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator

__all__ = ["FALSE_ALARM", "TOKENS", "check", "check_draws", "words"]


@torch.inference_mode()
def check(
    speculator: Speculator,
    prompts: Prompts,
    plans: Mapping[str, Plan],
    *,
    draws: int,
    places: int,
    max_new_tokens: int,
    batch: int = 8,
    seed: int = 0,
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """Compare every plan with the target, greedy ones by their text, sampled ones by their
    distribution.

    Args:
        plans: by the name under which they are reported.
        draws: sequences drawn by every sampled plan, over all its prompts.
        places: how many prompts: the first ones for greedy text, the shortest ones, which cost
            least, for sampled text.
    Returns: {"greedy": rows, "law": rows}, plain JSON values; each row has a verdict.
    """
    check_draws(draws, places)
    drafting = {name: plan for name, plan in plans.items() if plan.tree.size}
    greedy = {name: plan for name, plan in drafting.items() if plan.policy.greedy}
    policies = list(
        dict.fromkeys(plan.policy for plan in drafting.values() if not plan.policy.greedy)
    )
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch": batch}
    first = [list(prompt) for prompt in prompts[:places]]
    same = same_text(speculator, first, greedy, watch=watch, **settings) if greedy else []
    shortest = sorted((list(prompt) for prompt in prompts), key=len)[:places]
    rows = []
    for policy in policies:
        own = {name: plan for name, plan in drafting.items() if plan.policy == policy}
        rows += same_distribution(speculator, shortest, own, draws=draws, seed=seed, watch=watch)
    return {"greedy": same, "law": judged(rows)}
