"""The code that travels with an exported folder, so that transformers alone can load it (`jdllm export --format hf`).

Four of our modules are copied with their imports made relative; transformers then takes them for the folder's own code and
runs it only when told to (`trust_remote_code=True`).
"""

from __future__ import annotations

import json
from pathlib import Path

import jdllm.config
from weights_port import convert

HERE = Path(__file__).parent
SOURCES = {
    "configuration_fields.py": Path(jdllm.config.__file__),
    "convert.py": HERE / "convert.py",
    "torch_ldlm.py": HERE / "torch_ldlm.py",
    "modeling_ldlm.py": HERE / "modeling_ldlm.py",
}
IMPORTS = {
    "from jdllm.config import": "from .configuration_fields import",
    # transformers copies a module only where it is named behind the dot
    "from weights_port import convert\n": "from . import convert\nfrom .convert import FORMAT as _\n",
    "from weights_port import torch_ldlm\n": "from . import torch_ldlm\nfrom .torch_ldlm import load as _\n",
    "    from jaxtyping import Float, Int\n": "",
}
AUTO_MAP = {"AutoConfig": "modeling_ldlm.LDLMConfig", "AutoModel": "modeling_ldlm.LDLMModel"}


def relative(source: str) -> str:
    """A module's text with imports of our packages made relative."""
    for there, here in IMPORTS.items():
        source = source.replace(there, here)
    return source


def write_code(folder: Path) -> None:
    """Put the code into an exported folder, and say in its config.json where transformers finds it."""
    for name, path in SOURCES.items():
        (folder / name).write_text(relative(path.read_text(encoding="utf-8")), encoding="utf-8")
    path = folder / "config.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    values = {
        "model_type": "jdllm_ldlm", "architectures": ["LDLMModel"], "auto_map": AUTO_MAP, "dtype": about["dtype"],
        convert.NESTED: about,
    }  # fmt: skip
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
