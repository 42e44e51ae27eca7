"""Measure a package: acceptance, speed against plain decoding, guarantee, for chains and trees,
greedy and sampled.

Acceptance is counted over all prompts: at temperature 0 on the target's kept answers, which gives
the counts of decoding in a fraction of its time, above it by decoding in batches. Speed is measured
by decoding some of them one at a time, interleaved with plain decoding of the same prompts. The
table goes to the console, to evaluation.json (the form of a package's metrics.json) and, as a
picture, to acceptance.png. With exactness=true the guarantees are tested on this target and
package, too. With sim=true acceptance at temperatures above 0 is also computed, on texts that the
target samples, in a table of its own. A package that was trained jointly with its target is
compared with the original on held-out text.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from drafttrain.evaluating.asked import check_settings
from drafttrain.wiring.doors import door

DOOR = door("evaluate", text=("prompts",), check=check_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from drafttrain import checks
from drafttrain.decoding.replaying import refuse_unread
from drafttrain.decoding.speculator import Speculator
from drafttrain.evaluating.answering import replays_for
from drafttrain.evaluating.comparing import filled_trees, warn_of_length
from drafttrain.evaluating.measuring import changed, exact, measure, settings_of
from drafttrain.evaluating.parity import parity
from drafttrain.evaluating.saying import say
from drafttrain.evaluating.showing import show
from drafttrain.evaluating.simulating import simulated
from drafttrain.files import write_json
from drafttrain.packaging.decoding import read_plan
from drafttrain.packaging.manifest import DECODING, read_config
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.reporting.console import reading
from drafttrain.reporting.figures import acceptance_curve
from drafttrain.runs import new_folder, plain_value, provenance
from drafttrain.target.model import Target
from drafttrain.target.prompts import open_prompts
from drafttrain.wiring.building import build

RESULT, PICTURE = "evaluation.json", "acceptance.png"


@DOOR
def main(cfg: DictConfig) -> None:
    asked = check_settings(cfg)
    package = checks.path_of("package", cfg.package)
    config = read_config(package)
    source = open_prompts(cfg.prompts, plain_value(cfg.columns), reading)
    target: Target = build(cfg.target, work="decode")
    target = target_for(package, target)
    drafter = load_drafter(package, target)
    refuse_unread(asked.answers, drafter)
    plan = read_plan(package / DECODING, drafter)
    speculator = Speculator(target, drafter, plan, dtype=cfg.dtype)
    prompts = source.ids(target, cfg.limit, say, turns=cfg.turns, answer=asked.max_new_tokens)
    warn_of_length(config, prompts, asked.max_new_tokens)
    growths = filled_trees(asked.trees, speculator, drafter, package)
    asked.check_rules(growths, drafter)
    with new_folder(cfg.run_dir) as folder:
        if asked.replay and any(policy.greedy for policy in asked.policies):
            limit = asked.max_new_tokens
            speculator.replays = replays_for(target, prompts, limit, asked.answers, source, say)
        rows = measure(speculator, prompts, growths, asked, source)
        few = prompts[: asked.parity_prompts]
        result = {
            "settings": settings_of(asked, Path(cfg.package), source, prompts, speculator),
            "rows": rows,
            "sim": simulated(speculator, prompts, growths, asked) if cfg.sim else None,
            "target_change": changed(target, source, asked.change_rows),
            "parity": parity(speculator, drafter, few, asked.max_new_tokens),
            "exactness": exact(speculator, prompts, growths, asked) if cfg.exactness else None,
            "provenance": provenance(cfg),
        }
        write_json(folder / RESULT, result)
        drafted = [row for row in rows if row["nodes"]]
        acceptance_curve(drafted, folder / PICTURE, title=Path(cfg.package).name)
        show(result)
        say(f"wrote {folder / RESULT} and {folder / PICTURE}")


if __name__ == "__main__":
    main()
