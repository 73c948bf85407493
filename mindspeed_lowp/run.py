"""Run a Megatron training script with low-precision training added, without touching the script.

python -m mindspeed_lowp.run path/to/pretrain_gpt.py FLAGS
torchrun --nproc-per-node 8 -m mindspeed_lowp.run path/to/pretrain_gpt.py FLAGS
python -m torch.distributed.launch --nproc-per-node 8 -m mindspeed_lowp.run path/to/pretrain_gpt.py FLAGS

--emulate-npu, before the script: where there is no torch_npu, let the script import mindspeed_lowp's emulator
of it. Code written for Ascend, such as MindSpeed's, then runs on this machine's CPU.
"""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = "usage: python -m mindspeed_lowp.run [--emulate-npu] SCRIPT [FLAGS of the script ...]"
_EMULATE = "--emulate-npu"


def main() -> None:
    if sys.argv[1:2] and sys.argv[1].startswith("--local-rank="):
        # torch.distributed.launch's, before all else: Megatron has this flag.
        sys.argv.append(sys.argv.pop(1))
    emulate = _EMULATE in sys.argv[1:2]
    if emulate:
        del sys.argv[1]
    if len(sys.argv) < 2:
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    script = sys.argv[1]
    if script in ("-h", "--help"):
        print(f"{_USAGE}\n\n{__doc__}", end="")
        return
    if not os.path.isfile(script):
        sys.exit(f"error: no such script: {script} (looked in {os.getcwd()}); {_USAGE}")

    # As `python SCRIPT FLAGS` leaves them: a Megatron-LM checkout is found beside its own script.
    sys.argv = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))

    if emulate:
        from mindspeed_lowp import emulator

        try:
            emulator.install()
        except RuntimeError as error:
            sys.exit(f"error: {_EMULATE}: {error}")

    import mindspeed_lowp.adaptor  # noqa: F401  after sys.path is set, for it imports Megatron

    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
