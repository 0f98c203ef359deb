"""KV movement from prefill ranks to decode ranks: pure state machines here, sockets and libraries in `io`."""
