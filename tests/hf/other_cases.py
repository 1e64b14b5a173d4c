"""The cases of two processes that have files of their own: importing them registers them."""

import contrastive_cases  # noqa: F401
import dtensor_cases  # noqa: F401
import fp8_cases  # noqa: F401
import fp8_gather_cases  # noqa: F401
import lora_cases  # noqa: F401
import megatron_cases  # noqa: F401
import multi_token_cases  # noqa: F401
import optimizer_cases  # noqa: F401
import parallel_cases  # noqa: F401
import parallel_label_cases  # noqa: F401
import parallel_name_cases  # noqa: F401
import parallel_option_cases  # noqa: F401
