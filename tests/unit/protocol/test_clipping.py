"""Texts of a bounded size."""

from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.clipping import clip, clip_error
from sllm_runtime.protocol.errors import ErrorBody

ANY = st.text(st.characters(codec=None))


@given(text=ANY, nbytes=st.integers(0, 40))
def test_a_text_is_cut_between_two_characters(text: str, nbytes: int) -> None:
    whole, kept = text.encode(errors="backslashreplace"), clip(text, nbytes).encode()
    assert whole.startswith(kept)
    assert nbytes - 3 <= len(kept) <= nbytes or kept == whole


def test_an_error_fits_in_a_frame() -> None:
    long = "\N{GRINNING FACE}" * limits.MAX_PART
    body = ErrorBody(code=long, message=long, field=long, stage=long, detail=long)
    assert len(codec.pack(clip_error(body))) < limits.MAX_PART


@given(status=st.integers(), after=st.none() | st.floats())
def test_an_error_says_what_can_be_answered(status: int, after: float | None) -> None:
    kept = clip_error(ErrorBody(code="c", message="m", status=status, retry_after_s=after))
    assert kept.status == (status if 400 <= status < 600 else 500)
    assert kept.retry_after_s is None or (kept.retry_after_s == after and 0 <= kept.retry_after_s <= 86_400)
