"""The two endpoints that generate: /v1/chat/completions and /v1/completions.

In: HTTP requests. Out: one JSON body, or a stream of SSE events. Invariants: a request ends in
exactly one of an answer, an `ApiError`, or nothing (the client has gone); a stream is not begun
before the first token, so that whatever fails until then has its own HTTP status; a stream that
fails later ends with an error event and without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from gateway.attempt import CALL_SLACK_S
from gateway.course import Course
from gateway.errors import ApiError, model_not_found, request_failed, timed_out
from gateway.generation_job import Job, make_job
from gateway.http_shell import GATEWAY, JSON_HEADERS, PAIR, REQUEST_ID, STREAMING
from gateway.merge import Ending
from gateway.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
    plain_messages,
    prompt_of,
)
from gateway.openai_replies import DONE, ChatReply, CompletionReply, Reply, ReplyHead, Usage, error_event
from gateway.output import Output, Piece
from gateway.service import Gateway
from gateway.terms import terms_of

log = logging.getLogger("paceline.gateway")

# The instances time out first, then the calls to them; this is for a client that does not read.
_DEADLINE_SLACK_S = CALL_SLACK_S + 3.0
_LONG_TEXT = 32_768  # characters; tokenizing more would hold up the streams of others
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
    """One request while it generates."""

    gateway: Gateway
    request: GenerationRequest
    job: Job
    course: Course
    output: Output
    reply: Reply
    arrived: float

    @property
    def usage(self) -> Usage:
        return Usage(len(self.job.prompt_ids), self.output.count)

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


async def chat(http: web.Request) -> web.StreamResponse:
    return await _counted(http, "chat")


async def completions(http: web.Request) -> web.StreamResponse:
    return await _counted(http, "completions")


async def _counted(http: web.Request, endpoint: str) -> web.StreamResponse:
    gateway = http.app[GATEWAY]
    arrived = time.monotonic()
    outcome = "failed"
    try:
        with gateway.admitted():
            async with asyncio.timeout(gateway.config.request_timeout_s + _DEADLINE_SLACK_S):
                response, outcome = await _serve(http, endpoint, arrived)
        return response
    except ApiError as error:
        outcome = "rejected" if error.status < 500 else "failed"
        raise
    except web.HTTPException:
        outcome = "rejected"
        raise
    except TimeoutError:
        outcome = "timeout"
        raise timed_out("the request took too long") from None
    except (asyncio.CancelledError, ConnectionError):
        outcome = "client_gone"
        raise
    finally:
        gateway.metrics.requests.labels(endpoint, outcome).inc()
        gateway.metrics.duration.observe(time.monotonic() - arrived)


async def _serve(http: web.Request, endpoint: str, arrived: float) -> tuple[web.StreamResponse, str]:
    gateway = http.app[GATEWAY]
    body = await http.read()
    request: GenerationRequest = parse_chat(body) if endpoint == "chat" else parse_completion(body)
    name = gateway.config.served_name
    if request.model is not None and request.model != name:
        raise model_not_found(request.model)
    terms = terms_of(http.headers, request.user)
    await gateway.pair_awaited()
    job = make_job(request, await _prompt_ids(gateway, request), gateway.limits(), random.getrandbits(63))
    request_id = http[REQUEST_ID]
    with gateway.course(request_id, job, terms, arrived) as course:
        http[PAIR] = course.pair
        gateway.metrics.prompt_tokens.inc(len(job.prompt_ids))
        gateway.metrics.request_prompt_tokens.observe(len(job.prompt_ids))
        run = Run(
            gateway, request, job, course, _output(gateway, job), _reply(gateway, request, job, request_id), arrived
        )
        try:
            return await (_stream(http, run) if request.stream else _collect(http, run))
        finally:
            gateway.metrics.request_output_tokens.observe(run.output.count)


async def _prompt_ids(gateway: Gateway, request: GenerationRequest) -> list[int]:
    files = gateway.files
    if isinstance(request, CompletionRequest):
        prompt = prompt_of(request)
        if isinstance(prompt, list):
            return prompt
        text, special = prompt, True
    else:
        generation_prompt = request.add_generation_prompt is not False
        messages = plain_messages(request.messages)
        text = files.render_chat(messages, generation_prompt, request.chat_template_kwargs)
        special = False  # the template has written them all
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(files.encode, text, special)
    return files.encode(text, special)


def _output(gateway: Gateway, job: Job) -> Output:
    return Output(gateway.files.vocabulary, job.stops, job.sampling.min_tokens, gateway.ending_ids(job))


def _reply(gateway: Gateway, request: GenerationRequest, job: Job, request_id: str) -> Reply:
    vocabulary, name, created = gateway.files.vocabulary, gateway.config.served_name, int(time.time())
    if isinstance(request, ChatRequest):
        head = ReplyHead(f"chatcmpl-{request_id}", created, name)
        return ChatReply(head, vocabulary, request.wanted_logprobs, bool(request.return_token_ids))
    echo = ""
    if request.echo:
        prompt = prompt_of(request)
        echo = prompt if isinstance(prompt, str) else vocabulary.decode(prompt)
    head = ReplyHead(f"cmpl-{request_id}", created, name)
    return CompletionReply(head, vocabulary, request.wanted_logprobs, bool(request.return_token_ids), echo)


async def _collect(http: web.Request, run: Run) -> tuple[web.StreamResponse, str]:
    pieces: list[Piece] = []
    reason = ""
    async for update in run.updates():
        pieces.append(update.piece)
        reason = update.finish_reason or reason
    http[PAIR] = run.course.pair
    return web.Response(body=run.reply.whole(pieces, reason, run.usage), headers=JSON_HEADERS), reason


async def _stream(http: web.Request, run: Run) -> tuple[web.StreamResponse, str]:
    response: web.StreamResponse | None = None
    outcome = "failed"
    with_tokens = run.request.wanted_logprobs is not None or run.request.return_token_ids
    try:
        async for update in run.updates():
            data = b""
            if response is None:
                response = web.StreamResponse(headers=_SSE_HEADERS)
                http[STREAMING], http[PAIR] = True, run.course.pair
                await response.prepare(http)
                data = run.reply.opening()
            # Held-back text makes empty pieces; they are of interest only to a client that wants the tokens.
            if update.piece.text or update.finish_reason or (with_tokens and update.piece.tokens):
                usage = run.usage if run.request.continuous_usage else None
                data += run.reply.event(update.piece, update.finish_reason, usage)
            if update.finish_reason is not None:
                outcome = update.finish_reason
                if run.request.include_usage:
                    data += run.reply.usage_event(run.usage)
                data += DONE
            if data:
                await response.write(data)
    except ApiError as error:
        if response is None:
            raise
        log.warning("%s failed after %d tokens: %s", run.course.request_id, run.output.count, error.message)
        await response.write(error_event(error))
    assert response is not None, "updates end with a finish or raise"
    await response.write_eof()
    return response, outcome
