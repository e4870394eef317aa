"""Of all that is wrong with ``logit_bias`` only so much is looked for: ``true`` is no number here."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sllm_runtime.protocol.openai_requests import CompletionRequest


def test_of_a_million_biases_that_are_true_only_the_first_is_told() -> None:
    with pytest.raises(ValidationError) as told:
        CompletionRequest.model_validate(
            {"model": "m", "prompt": "", "logit_bias": {str(n): True for n in range(50_000)}}
        )
    assert told.value.error_count() < 10
