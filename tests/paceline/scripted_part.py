"""Not a test: a child that stands in for a daemon or a gateway. `scripted_part.py PORT [WORD…]`.

It answers GET with 200 at any path. Words: `stubborn` ignores SIGTERM; `busy` answers 503; `broken`
says why and exits with 3; `child` starts a process in a session of its own and writes its pid to
standard output, as a daemon starts a rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = sys.argv[2:]


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if "busy" in WORDS else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if "broken" in WORDS:
        print("the scripted reason", file=sys.stderr)
        sys.exit(3)
    if "stubborn" in WORDS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in WORDS:
        command = [sys.executable, "-m", "paceline.die_with_parent", str(os.getpid()), "sleep", "300"]
        if "stubborn" in WORDS:
            command = command[4:]
        started = subprocess.Popen(command, start_new_session=True)
        print(f"child {started.pid}", flush=True)
        time.sleep(0.2)  # until it has become its command
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answering).serve_forever()


if __name__ == "__main__":
    main()
