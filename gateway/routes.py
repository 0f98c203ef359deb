"""The HTTP application: all routes, and the handlers of those that do not generate."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from gateway import generation
from gateway.api_keys import KeyRing
from gateway.errors import invalid, model_not_found
from gateway.http_limits import body_deadline
from gateway.http_shell import GATEWAY, JSON_HEADERS, add_headers, openai_errors
from gateway.openai_api import parse_detokenize, parse_tokenize, plain_messages
from gateway.openai_replies import encode
from gateway.service import Gateway

_STARTED = int(time.time())


def make_application(gateway: Gateway, keys: KeyRing | None = None) -> web.Application:
    checks = [keys.check] if keys is not None else []
    application = web.Application(
        client_max_size=gateway.config.max_body_bytes, middlewares=[openai_errors, *checks, body_deadline()]
    )
    application[GATEWAY] = gateway
    application.on_response_prepare.append(add_headers)
    application.add_routes(
        [
            web.post("/v1/chat/completions", generation.chat),
            web.post("/v1/completions", generation.completions),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{id:.+}", get_model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", health),
            web.get("/metrics", metrics),
        ]
    )
    return application


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=JSON_HEADERS)


def _model(gateway: Gateway) -> dict[str, Any]:
    name = gateway.config.served_name
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "paceline",
        "root": name,
        "parent": None,
        "max_model_len": gateway.limits().max_model_len,
    }


async def list_models(http: web.Request) -> web.Response:
    return _json({"object": "list", "data": [_model(http.app[GATEWAY])]})


async def get_model(http: web.Request) -> web.Response:
    model = _model(http.app[GATEWAY])
    if http.match_info["id"] != model["id"]:
        raise model_not_found(http.match_info["id"])
    return _json(model)


async def health(http: web.Request) -> web.Response:
    """Healthy means: a request sent now would find a pair."""
    gateway = http.app[GATEWAY]
    reason = gateway.why_unavailable()
    body: dict[str, Any] = {"status": "ok" if reason is None else "unavailable"}
    if reason is not None:
        body["reason"] = reason
    body["instances"] = gateway.registry.describe()
    return _json(body, 200 if reason is None else 503)


async def metrics(http: web.Request) -> web.Response:
    gateway = http.app[GATEWAY]
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=gateway.metrics.render(gateway.registry.fleet), headers=headers)


async def tokenize(http: web.Request) -> web.Response:
    gateway = http.app[GATEWAY]
    request = parse_tokenize(await http.read())
    _check_model(gateway, request.model)
    if request.messages is not None:
        messages, variables = plain_messages(request.messages), request.chat_template_kwargs
        ids = await gateway.encode(gateway.files.render_chat(messages, request.add_generation_prompt, variables), False)
    else:
        ids = await gateway.encode(request.prompt or "", request.add_special_tokens)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": gateway.limits().max_model_len, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = [gateway.files.vocabulary.decode([token], skip_special_tokens=False) for token in ids]
    return _json(body)


async def detokenize(http: web.Request) -> web.Response:
    gateway = http.app[GATEWAY]
    request = parse_detokenize(await http.read())
    _check_model(gateway, request.model)
    for token in request.tokens:
        if not 0 <= token < gateway.files.vocab_size:
            raise invalid(f"token {token} is not in 0 to {gateway.files.vocab_size - 1}", "tokens")
    return _json({"prompt": gateway.files.vocabulary.decode(request.tokens, skip_special_tokens=False)})


def _check_model(gateway: Gateway, name: str | None) -> None:
    if name is not None and name != gateway.config.served_name:
        raise model_not_found(name)
