"""Train a latent diffusion language model: text -> frozen encoder -> hidden states -> joint training -> a run folder.

    python experiments/train_ldlm.py                             # the quickstart preset, minutes on a CPU
    python experiments/train_ldlm.py --preset books --help       # every option, with the defaults of that preset
    python experiments/train_ldlm.py --preset smoke --training.steps 100 --name try-1

The same as `jdllm train`; the composition is weights_port/pipeline.py.
"""

import sys

from jdllm.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="train_ldlm.py", command="train"))
