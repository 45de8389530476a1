"""`Reading`: how the text of an answer is read, and what it may be: parsers and constraints of one model."""

from __future__ import annotations

from pocketllm.engine.constraint import TokenConstraint
from pocketllm.options import SamplingParams
from pocketllm.server.chat_job import ChatJob
from pocketllm.server.generation import Choice
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.grammar import AnswerForm, OneOf, ToolCalls, build_constraint
from pocketllm.text.markup import THINK_END, markup_of, opens_thinking
from pocketllm.text.output_parser import make_output_parser
from pocketllm.text.stream import TextStream
from pocketllm.text.tokenizer import Tokenizer


class Reading:
    """Building a choice may compile a grammar: call it outside the event loop."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._markup = markup_of(template)

    def completion(self, prompt: int, ids: list[int], form: AnswerForm | None, params: SamplingParams) -> Choice:
        """Plain text, as it comes. `prompt`: its number in the request."""
        return Choice(
            prompt,
            ids,
            params,
            TextStream(self._tokenizer, params.stop),
            make_output_parser(None, thinking=False, parse_tools=False),
            build_constraint(self._tokenizer, form) if form is not None else None,
        )

    def chat(self, job: ChatJob, text: str, ids: list[int], params: SamplingParams) -> Choice:
        """An answer to the conversation that was rendered as `text`."""
        parser = make_output_parser(
            self._template,
            tools=job.visible_tools,
            thinking=job.thinking.enabled is not False,
            parse_tools=bool(job.visible_tools),
            prompt=text,
        )
        return Choice(
            0,
            ids,
            params,
            TextStream(self._tokenizer, params.stop, keep=parser.markup.tags),
            parser,
            self._constraint(job, text),
            None if job.parallel_calls else 1,
        )

    def _constraint(self, job: ChatJob, text: str) -> TokenConstraint | None:
        """Thinking comes first, unless it is off, or the prompt has closed it already."""
        form, budget = self._form(job), job.thinking.budget
        if form is None and budget is None:
            return None
        thinks = self._markup.thinks and job.thinking.enabled is not False and not text.rstrip().endswith(THINK_END)
        return build_constraint(
            self._tokenizer,
            form,
            starts_after=THINK_END if thinks else None,
            opened=opens_thinking(text),
            thinking_budget=budget,
        )

    def _form(self, job: ChatJob) -> AnswerForm | None:
        calls = ToolCalls(self._markup.tools, job.tools, job.tool_choice.name, job.parallel_calls)
        if job.tool_choice.forced:
            return calls
        if job.form is not None and job.visible_tools and self._markup.tools is not None:
            return OneOf((calls, job.form))  # the model may call a tool instead
        return job.form
