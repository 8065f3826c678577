"""Ask torch which of CUDA's attention kernels it takes for each of ``attention_calls.CALLS``, without a GPU.

``python ask_attention.py CAPABILITY`` prints the answers as JSON, by the torch that is installed: a CUDA build has
CUDA's rules, a CPU build those of ``no_device.cpp``. ``python ask_attention.py --record``, with a CUDA build, writes
``attention_chosen.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def main(argument: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_in

    stand_in.load()
    import torch

    if argument == "--record":
        from attention_calls import CAPABILITIES, RECORD

        if torch.version.cuda is None:
            raise SystemExit(f"torch {torch.__version__} is built for CPUs and does not have CUDA's rules.")
        command = [sys.executable, __file__]
        found = {str(c): json.loads(subprocess.check_output([*command, str(c)])) for c in CAPABILITIES}
        RECORD.write_text(json.dumps({"torch": torch.__version__, "chosen": found}, indent=0) + "\n")
        return
    stand_in.install()
    from attention_calls import CALLS, chosen

    with stand_in.capability(int(argument)):
        print(json.dumps({str(call): chosen(call) for call in CALLS}))


if __name__ == "__main__":
    main(sys.argv[1])
