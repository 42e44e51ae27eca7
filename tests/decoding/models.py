"""Tiny models, plans and prompts for tests of decoding, and the test of a sampled text's
distribution."""

import torch
from scipy import stats

from drafttrain.decoding import rules
from drafttrain.decoding.exactness.distribution import SharedPrompt
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters

PLAIN = Plan(Tree.chain(0))
TREES = {"one": Tree.chain(1), "chain": Tree.chain(4), "tree": Tree.eagle1_static()}
PROMPTS = [[3, 5, 7, 9], [11], [20, 21, 22, 23, 24, 25, 26]]


def make(family="llama", **settings):
    target = load.tiny(family=family, **settings)
    torch.manual_seed(0)
    return target, drafters.make(Eagle1, target).eval()


# The distribution of sampled text -----------------------------------------------------------------
ROWS = 12_000
AT_ONCE = 2_000
"""Rows side by side: more of them do not fit the processor's caches."""
SMALL = {"vocab_size": 8, "sharpness": 1.5, "layers": 2, "width": 32}


def three_token_probs(target, prompt, policy):
    """(512) the target's own distribution of the next three tokens, by plain forward passes over
    all prefixes."""
    with torch.inference_mode():
        probs = torch.ones(1, dtype=torch.float64)
        prefixes = [list(prompt)]
        for _ in range(3):
            logits = target.model(input_ids=torch.tensor(prefixes), use_cache=False).logits[:, -1]
            probs = (probs[:, None] * policy.probs(logits).double()).flatten()
            prefixes = [prefix + [token] for prefix in prefixes for token in range(8)]
    return probs


def drawn(target, drafter, plan, rows, prompt):
    """(512) how often each text of three tokens is written after a prompt."""
    shared, texts = SharedPrompt(target), []
    for start in range(0, rows, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, rows))
        given = {"max_new_tokens": 3, "stop_ids": (), "row_numbers": numbers}
        texts += [
            output.ids
            for output in decode(shared, drafter, [prompt] * len(numbers), plan, **given)[0]
        ]
    return (torch.tensor(texts) @ torch.tensor([64, 8, 1])).bincount(minlength=512).double()


def p_value(target, drafter, plan, rows=ROWS, prompt=(3, 5, 2)):
    counts = drawn(target, drafter, plan, rows, prompt)
    expected = three_token_probs(target, prompt, plan.policy) * rows
    assert float(counts[expected < 1e-9].sum()) == 0  # nothing outside the support
    big = expected >= 5
    observed = torch.cat((counts[big], counts[~big].sum()[None]))
    wanted = torch.cat((expected[big], expected[~big].sum()[None]))
    good = wanted > 0
    return stats.chisquare(
        observed[good].numpy(), (wanted[good] * rows / wanted[good].sum()).numpy()
    ).pvalue


SAMPLED = {
    "chain ratio": Plan(Tree.chain(3), Policy(1.0), rule="ratio"),
    "chain warm": Plan(Tree.chain(2), Policy(1.5)),
    "tree without replacement": Plan(Tree.expansion([3, 2, 1]), Policy(0.7)),
    "tree filtered": Plan(Tree.expansion([2, 2]), Policy(1.0, 6, 0.95)),
    "tree one-hot": Plan(Tree.expansion([2, 2]), Policy(1.0), sampled=False),
    "chain one-hot": Plan(Tree.chain(3), Policy(1.0), sampled=False),
    "chain block": Plan(Tree.chain(3), Policy(1.0)),
    "tree k-seq": Plan(Tree.expansion([3, 2]), Policy(1.0), rule="k_seq"),
    "tree matched": Plan(Tree.expansion([2, 2]), Policy(1.0), rule="sample_and_match"),
}


def sharpened(p, proposal, u):
    """Mistake: the ratio uses a sharper q than the tokens were drawn from."""
    q = proposal.q**2
    return rules.ratio(
        p, type(proposal)(**(vars(proposal) | {"q": q / q.sum(-1, keepdim=True)})), u
    )
