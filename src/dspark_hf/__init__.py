"""DSpark speculative decoding inside Transformers' `generate()`.

Importing the package is all the set-up there is:

    import dspark_hf
    draft = dspark_hf.DSparkDraftModel.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")
    out = model.generate(**inputs, assistant_model=draft)
"""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .generation.candidate_generator import DSparkCandidateGenerator
from .generation.hook import decoder, install, uninstall
from .generation.logits_process import DSparkLogitsProcessor
from .modeling_dspark import DSparkDraftModel
from .stats import GenerateDSparkOutput, GenerationStats, RoundEvent, record_generation

AutoConfig.register(DSparkConfig.model_type, DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDraftModel)
install()

__all__ = [
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkLogitsProcessor",
    "GenerateDSparkOutput",
    "GenerationStats",
    "RoundEvent",
    "decoder",
    "install",
    "record_generation",
    "uninstall",
]
