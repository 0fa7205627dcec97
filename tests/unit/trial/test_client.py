from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rewarm.errors import StorageError
from rewarm.trial.client import Client

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Client]]:
    """A server that answers every request by the function given."""
    servers = []

    def start(answer: Answer) -> Client:
        def handle(handler: BaseHTTPRequestHandler) -> None:
            handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
            answer(handler)

        methods = {"do_GET": handle, "do_POST": handle, "log_message": lambda *_: None}
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (BaseHTTPRequestHandler,), methods))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Client(f"http://127.0.0.1:{server.server_port}", "m", timeout_s=10)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def text(body: str, code: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


STREAM = (
    'data: {"choices": [{"token_ids": []}]}\n\n: a comment\n\n'
    'data: {"choices": [{"token_ids": [5, 6]}]}\n\n'
    'data: {"choices": [{"text": "a\u2028b\x85c", "token_ids": [7]}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n'
)


def test_tokens_are_gathered_over_the_pieces(serve) -> None:
    records, wall_s = serve(text(STREAM)).complete([(3, [1, 2]), (4, [1])], 3)
    assert [(each["context"], each["prompt_tokens"], each["tokens"]) for each in records] == [
        (3, 2, [5, 6, 7]),
        (4, 1, [5, 6, 7]),
    ]
    assert all(0 < each["ttft_s"] <= each["total_s"] <= wall_s for each in records)
    assert not any(each["error"] for each in records)


def test_the_first_token_ends_the_wait_not_the_first_piece(serve) -> None:
    """The token's time lies after the moment at which it was sent, whatever came before it."""
    sent = threading.Event()
    go = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'data: {"choices": [{"token_ids": []}]}\n\n')
        handler.wfile.flush()
        sent.set()
        go.wait(10)
        handler.wfile.write(b'data: {"choices": [{"token_ids": [1]}]}\n\n')

    client = serve(answer)
    records: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: records.extend(client.complete([(0, [1])], 1)[0]))
    thread.start()
    assert sent.wait(10)
    assert not records
    go.set()
    thread.join(10)
    assert records[0]["tokens"] == [1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (text("busy", 503), "HTTP 503: busy"),
        (text('data: {"error": {"message": "engine died"}}\n\n'), "engine died"),
        (text("data: {nonsense\n\n"), "JSONDecodeError"),
        (text("data: [DONE]\n\n"), "no token came"),
    ],
)
def test_what_goes_wrong_is_text_in_the_record(serve, answer: Answer, error: str) -> None:
    ((record,), _) = serve(answer).complete([(0, [1])], 1)
    assert error in record["error"]


def test_a_server_that_is_not_there(serve) -> None:
    client = Client("http://127.0.0.1:9", "m")
    assert not client.is_up()
    with pytest.raises(StorageError, match="does not answer"):
        client.counters()
    ((record,), _) = client.complete([(0, [1])], 1)
    assert "ConnectError" in record["error"]


METRICS = """# HELP vllm:prompt_tokens_total x
vllm:prompt_tokens_total{engine="0",model_name="a b"} 10.0
vllm:prompt_tokens_total{engine="1",model_name="a b"} 5.0
vllm:prompt_tokens_created{engine="0"} 1.7e9
vllm:external_prefix_cache_hits_total{engine="0"} 1.2e3
vllm:request_success_total{finished_reason="length"} 2.0
"""


def test_counters_are_summed_over_labels(serve) -> None:
    client = serve(text(METRICS))
    assert client.counters() == {"prompt_tokens": 15.0, "external_hits": 1200.0, "answered": 2.0}
    assert client.counters_after({"external_hits": 200.0}, answers=2)["external_hits"] == 1000.0


def test_a_reset_that_is_refused_is_asked_again_and_then_given_up(serve) -> None:
    answers = iter(['{"success": false}', '{"success": false}', '{"success": true}'])

    def answer(handler: BaseHTTPRequestHandler) -> None:
        text(next(answers))(handler)

    serve(answer).reset_prefix_cache(external=True)
    with pytest.raises(StorageError, match="did not empty"):
        serve(text('{"success": false}')).reset_prefix_cache(external=False, wait_s=0)
