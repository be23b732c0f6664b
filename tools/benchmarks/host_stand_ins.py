"""Fake server and fake tokenizer for the benchmark of the host's path."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """Serve the same JSON for every POST, in threads of this process. Yield the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def random_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of words of up to four letters. It tokenises text into bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (_word(number) for number in range(len(ascii_lowercase), vocab_size))
    vocabulary: dict[str, int] = {}
    for piece in [*alphabet, *words][:vocab_size]:
        vocabulary[piece] = len(vocabulary)
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=pieces)


def _word(number: int) -> str:
    """Write a number with letters as digits. Numbers from 26 on have more than one letter."""
    letters = ""
    while number:
        number, digit = divmod(number, len(ascii_lowercase))
        letters += ascii_lowercase[digit]
    return letters
