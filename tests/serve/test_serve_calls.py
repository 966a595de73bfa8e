"""How far a chat is from the decoding loop."""

from __future__ import annotations

from service_support import client_of, fake_service

from tests.scripts.calls import Trace, called, report

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
MOST = 12


def test_a_chat_reaches_the_loop_in_few_calls(tmp_path):
    """From the route that gets it, over the threads that hand it on, to the loop on the engine's worker."""
    trace = Trace("answer", called("decode_steps"))
    with trace.installed():
        service = fake_service(tmp_path)
        with client_of(service) as client:
            trace.armed = True
            assert client.post("/v1/chat/completions", json=BODY).is_success
    service.close()
    found = report(trace.chain)
    assert found["calls"] <= MOST
    assert [name.rpartition(".")[2] for name, _ in trace.chain][:3] == ["answer", "__aenter__", "_started"]
