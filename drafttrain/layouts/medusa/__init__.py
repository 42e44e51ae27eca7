"""Medusa's heads (arXiv:2401.10774) as vLLM reads them, and as FasterDecoding's code, TGI and
TensorRT-LLM do.

| vLLM                         | FasterDecoding        | shape | |
| blocks.{j}.layers.{i}.weight | {j}.{i}.linear.weight | (d d) | residual blocks of head j |
| blocks.{j}.layers.{i}.bias   | {j}.{i}.linear.bias   | (d)   | vLLM: only with medusa_fc_bias |
| lm_heads.{j}.weight          | {j}.{L}.weight        | (v d) | vLLM: or one lm_head.weight, with |
|                              |                       |       | original_lm_head |
| token_map                    | -                     | (w)   | int64 ids of a reduced |
|                              |                       |       | vocabulary; not written |

Head j guesses x_{t+2+j} from h_t. FasterDecoding's code makes all blocks of a head one shared
module. vLLM renames every key of a config that holds "num" with "heads" or "layers"; it has code
for a token_map, but its loader stops at one, which it takes for a weight that the file lacks. Read
from: vLLM 0.32 model_executor/models/medusa.py and transformers_utils/configs/medusa.py,
FasterDecoding/Medusa medusa/model/medusa_model.py, TensorRT-LLM's load_medusa_hf.
"""

from __future__ import annotations

from drafttrain.drafter.medusa import Medusa
from drafttrain.layouts.layout import Layout, settings_of
from drafttrain.layouts.medusa.checking import check, default_engine, recognises
from drafttrain.layouts.medusa.facts import FILE, READINGS
from drafttrain.layouts.medusa.reading import read
from drafttrain.layouts.medusa.writing import write

LAYOUT = Layout(
    name="medusa",
    what="Medusa heads",
    turn=20,
    readings=READINGS,
    recognises=recognises,
    check=check,
    default_engine=default_engine,
    drafters=(Medusa,),
    write=write,
    read=read,
    shape=settings_of("heads", "blocks", "own_head"),
    speculators=("medusa",),
)
__all__ = ["FILE", "LAYOUT"]
