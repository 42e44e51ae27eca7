"""Write the embedded target as a directory of transformers, for engines that cannot reach a hub.

Usage: python scripts/engines/target.py folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

from proof import embedded, write_target

from drafttrain.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        print(write_target(embedded(), options.folder))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
