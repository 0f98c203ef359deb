"""The two endpoints that generate: /v1/chat/completions and /v1/completions.

In: HTTP requests. Out: one JSON body, or a stream of SSE events. Invariants: a request ends in
exactly one of an answer, an `ApiError`, or nothing (the client has gone); a stream is not begun
before the first token, so that whatever fails until then has its own HTTP status; a stream that
fails later ends with an error event and without [DONE]. Each choice of a request is a course of its
own; the choices succeed together, and when one fails, or the client goes, all of them end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from aiohttp import web

from gateway.attempt import CALL_SLACK_S
from gateway.course import Course
from gateway.errors import ApiError, invalid, model_not_found, request_failed, timed_out
from gateway.generation_job import Job, make_jobs
from gateway.http_shell import GATEWAY, JSON_HEADERS, PAIR, REQUEST_ID, STREAMING, WATCH
from gateway.instances import Pair
from gateway.interleaved import interleaved
from gateway.merge import Ending
from gateway.openai_api import (
    ChatRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
    plain_messages,
    prompts_of,
)
from gateway.openai_replies import (
    DONE,
    ChatReply,
    ChoiceOutput,
    CompletionReply,
    Reply,
    ReplyHead,
    Usage,
    error_event,
)
from gateway.output import Output, Piece
from gateway.request_watch import RequestWatch, watched
from gateway.service import Gateway
from gateway.terms import Terms, terms_of

log = logging.getLogger("paceline.gateway")

# The instances time out first, then the calls to them; this is for a client that does not read.
_DEADLINE_SLACK_S = CALL_SLACK_S + 3.0
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Update:
    piece: Piece
    finish_reason: str | None


@dataclass(slots=True)
class Run:
    """One choice while it generates."""

    gateway: Gateway
    course: Course
    output: Output
    arrived: float  # the request; monotonic

    async def updates(self) -> AsyncIterator[Update]:
        """What the client may see, batch by batch; the last one has the finish reason. Failure raises."""
        last, first = self.arrived, True
        while True:
            batch = await self.course.next_batch()
            if batch.tokens:
                now = time.monotonic()
                self.gateway.metrics.tokens_arrived(len(batch.tokens), now - last, first)
                last, first = now, False
            piece = self.output.push(batch.tokens)
            if self.output.stopped:
                self.course.satisfied("stop string")
                yield Update(piece, "stop")
                return
            if batch.finish is None:
                yield Update(piece, None)
                continue
            if batch.finish.ending is Ending.FAILED:
                if piece.tokens:
                    yield Update(piece, None)
                raise request_failed(batch.finish.status, batch.finish.reason)
            tail = self.output.finish()
            reason = "stop" if self.output.stopped else batch.finish.ending.value
            yield Update(Piece(piece.text + tail.text, piece.tokens, piece.offsets), reason)
            return


@dataclass(slots=True)
class Answer:
    """One request while it generates: its choices in the order of their indexes."""

    request: GenerationRequest
    reply: Reply
    runs: Sequence[Run]
    prompt_tokens: int  # each prompt once, however many choices it has

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, sum(run.output.count for run in self.runs))

    @property
    def pair(self) -> Pair:
        """Where the first choice runs now."""
        return self.runs[0].course.pair

    def updates(self) -> AsyncGenerator[tuple[int, Update], None]:
        """What any choice has to show, with its index."""
        return interleaved([run.updates() for run in self.runs])


async def chat(http: web.Request) -> web.StreamResponse:
    return await _counted(http, "chat")


async def completions(http: web.Request) -> web.StreamResponse:
    return await _counted(http, "completions")


async def _counted(http: web.Request, endpoint: str) -> web.StreamResponse:
    gateway = http.app[GATEWAY]
    with watched(gateway.metrics, gateway.tracer, f"POST {http.path}", http.headers, time.monotonic()) as watch:
        http[WATCH] = watch
        return await _observed(http, endpoint, watch)


async def _observed(http: web.Request, endpoint: str, watch: RequestWatch) -> web.StreamResponse:
    gateway, arrived = http.app[GATEWAY], watch.breakdown.arrived
    outcome = "failed"
    try:
        with gateway.admitted():
            async with asyncio.timeout(gateway.config.request_timeout_s + _DEADLINE_SLACK_S):
                response, outcome = await _serve(http, endpoint, watch)
        return response
    except ApiError as error:
        outcome = _outcome_of(error)
        raise
    except (web.HTTPException, web.RequestPayloadError):
        outcome = "rejected"
        raise
    except TimeoutError:
        outcome = "timeout"
        raise timed_out("the request took too long") from None
    except (asyncio.CancelledError, ConnectionError):
        outcome = "client_gone"
        raise
    finally:
        watch.outcome = outcome
        gateway.metrics.requests.labels(endpoint, outcome).inc()
        gateway.metrics.duration.observe(time.monotonic() - arrived)


async def _serve(http: web.Request, endpoint: str, watch: RequestWatch) -> tuple[web.StreamResponse, str]:
    gateway = http.app[GATEWAY]
    body = await http.read()
    request: GenerationRequest = parse_chat(body) if endpoint == "chat" else parse_completion(body)
    name = gateway.config.served_name
    if request.model is not None and request.model != name:
        raise model_not_found(request.model)
    terms = terms_of(http.headers, request.user)
    await gateway.pair_awaited(terms.timeout_s)
    prompts = await _prompts(gateway, request)
    jobs = make_jobs(request, prompts, gateway.limits(), random.getrandbits(62))
    if len(jobs) > gateway.config.max_inflight:
        most = gateway.config.max_inflight
        raise invalid(f"the request asks for {len(jobs)} choices, but at most {most} run here at once", "n")
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    watch.parsed()
    watch.span.describe({"request.id": http[REQUEST_ID], "prompt.tokens": prompt_tokens})
    with ExitStack() as courses:
        if len(jobs) > 1:
            courses.enter_context(gateway.admitted(len(jobs) - 1))
        runs = [_start(courses, http, job, name, terms) for job, name in zip(jobs, _names(http, jobs), strict=True)]
        answer = Answer(request, _reply(http, request, len(jobs)), runs, prompt_tokens)
        http[PAIR] = answer.pair
        gateway.metrics.prompt_tokens.inc(prompt_tokens)
        gateway.metrics.request_prompt_tokens.observe(prompt_tokens)
        try:
            return await (_stream(http, answer) if request.stream else _collect(http, answer))
        finally:
            gateway.metrics.request_output_tokens.observe(answer.usage.completion)


def _names(http: web.Request, jobs: Sequence[Job]) -> list[str]:
    """What the instances know each choice by."""
    request_id = http[REQUEST_ID]
    return [request_id] if len(jobs) == 1 else [f"{request_id}-{index}" for index in range(len(jobs))]


def _start(courses: ExitStack, http: web.Request, job: Job, name: str, terms: Terms) -> Run:
    gateway, arrived = http.app[GATEWAY], http[WATCH].breakdown.arrived
    course = courses.enter_context(gateway.course(name, job, terms, arrived))
    output = Output(gateway.files.vocabulary, job.stops, job.sampling.min_tokens, gateway.ending_ids(job))
    return Run(gateway, course, output, arrived)


async def _prompts(gateway: Gateway, request: GenerationRequest) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        messages = plain_messages(request.messages)
        generation_prompt = request.add_generation_prompt is not False
        text = gateway.files.render_chat(messages, generation_prompt, request.chat_template_kwargs)
        return [await gateway.encode(text, False)]  # the template has written the special tokens
    special = request.add_special_tokens
    return [
        prompt if isinstance(prompt, list) else await gateway.encode(prompt, special) for prompt in prompts_of(request)
    ]


def _reply(http: web.Request, request: GenerationRequest, choices: int) -> Reply:
    gateway = http.app[GATEWAY]
    vocabulary, name, created = gateway.files.vocabulary, gateway.config.served_name, int(time.time())
    if isinstance(request, ChatRequest):
        head = ReplyHead(f"chatcmpl-{http[REQUEST_ID]}", created, name)
        return ChatReply(head, vocabulary, request.wanted_logprobs, bool(request.return_token_ids))
    echoes = [""] * choices
    if request.echo:
        texts = [prompt if isinstance(prompt, str) else vocabulary.decode(prompt) for prompt in prompts_of(request)]
        echoes = [text for text in texts for _ in range(choices // len(texts))]
    head = ReplyHead(f"cmpl-{http[REQUEST_ID]}", created, name)
    return CompletionReply(head, vocabulary, request.wanted_logprobs, bool(request.return_token_ids), echoes)


def _outcome_of(error: ApiError) -> str:
    if error.status < 500:
        return "rejected"
    return "timeout" if error.status == 504 else "failed"


def _outcome(reasons: Sequence[str]) -> str:
    """One word for the metrics: a request is cut short if any of its choices is."""
    return "length" if "length" in reasons else "stop"


async def _collect(http: web.Request, answer: Answer) -> tuple[web.StreamResponse, str]:
    choices = [ChoiceOutput() for _ in answer.runs]
    async with aclosing(answer.updates()) as updates:
        async for index, update in updates:
            choices[index].pieces.append(update.piece)
            choices[index].finish_reason = update.finish_reason or ""
    http[PAIR] = answer.pair
    body = answer.reply.whole(choices, answer.usage)
    return web.Response(body=body, headers=JSON_HEADERS), _outcome([choice.finish_reason for choice in choices])


async def _stream(http: web.Request, answer: Answer) -> tuple[web.StreamResponse, str]:
    response: web.StreamResponse | None = None
    request, reply = answer.request, answer.reply
    opened: set[int] = set()
    reasons: list[str] = []
    failure = "failed"
    with_tokens = request.wanted_logprobs is not None or request.return_token_ids
    try:
        async with aclosing(answer.updates()) as updates:
            async for index, update in updates:
                data = b""
                if response is None:
                    response = web.StreamResponse(headers=_SSE_HEADERS)
                    http[STREAMING], http[PAIR] = True, answer.pair
                    await response.prepare(http)
                if index not in opened:
                    opened.add(index)
                    data = reply.opening(index)
                # Held-back text makes empty pieces; they are of interest only to a client that wants the tokens.
                if update.piece.text or update.finish_reason or (with_tokens and update.piece.tokens):
                    usage = answer.usage if request.continuous_usage else None
                    data += reply.event(index, update.piece, update.finish_reason, usage)
                if update.finish_reason is not None:
                    reasons.append(update.finish_reason)
                if len(reasons) == len(answer.runs):
                    data += (reply.usage_event(answer.usage) if request.include_usage else b"") + DONE
                if data:
                    await response.write(data)
                    http[WATCH].delivered()
    except ApiError as error:
        if response is None:
            raise
        log.warning("%s failed after %d tokens: %s", http[REQUEST_ID], answer.usage.completion, error.message)
        # The other choices are told to end now, not once the client has read the event.
        for run in answer.runs:
            run.course.cancel("another choice of its request failed")
        failure = _outcome_of(error)
        await response.write(error_event(error))
    assert response is not None, "updates end with a finish or raise"
    await response.write_eof()
    return response, _outcome(reasons) if len(reasons) == len(answer.runs) else failure
