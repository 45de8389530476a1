"""What all request bodies share: unknown fields are refused, and sampling fields are the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams

Json = dict[str, Any]


class Part(BaseModel):
    """A JSON object in a request: no type is guessed ("0.7" is no number), no field ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Part):
    """A request. `no_effect`: fields of the API that change nothing here, and the values that are accepted for them
    (None: any). Other values, and all other unknown fields, are a 400 that names the field."""

    no_effect: ClassVar[Mapping[str, tuple[object, ...] | None]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name not in cls.no_effect:
                kept[name] = value
                continue
            accepted = cls.no_effect[name]
            if accepted is not None and value is not None and value not in accepted:
                values = " or ".join(repr(v) for v in accepted)
                raise ValueError(f"'{name}' is not supported: leave it out" + (f", or send {values}" if values else ""))
        return kept


class SamplingFields(Body):
    """How tokens are chosen; what is not given comes from the model's own generation config, else temperature 1."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: all tokens")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, description="the i-th choice of a prompt uses seed + i")
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id, as a text -> added to its logit")

    def sampling(
        self, defaults: Mapping[str, float], *, max_tokens: int | None, logprobs: int | None = None
    ) -> SamplingParams:
        """OptionError if a value is impossible."""
        values: dict[str, Any] = {**defaults, "max_tokens": max_tokens, "logprobs": logprobs}
        for name in SamplingFields.model_fields:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.top_k == -1:
            values["top_k"] = 0
        values["stop"] = stop_strings(self.stop)
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams.of(**values)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _token_id(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise RequestError(f"logit_bias: {text!r} is no token id")
    return int(text)


def given(part: BaseModel) -> Json:
    """The fields that the client sent, as JSON."""
    return part.model_dump(exclude_unset=True)
