"""Texts for the target to continue: the beginning of a document as a conversation's question, its end as the answer.

So what is known of answers holds for continuations too: seeds, cut ends, and tokens that are read back
(responses.py). Their template is chat.py's PLAIN. Not here: where documents come from (segments.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable, check_messages, messages_digest

# Characters of a document that are tokenised for each token of its beginning, at first: more than texts have, less than
# books.
MOST_CHARACTERS = 32


@dataclass(frozen=True)
class Beginnings:
    """Makes beginnings of `least` to `most` tokens, as many as the document's own hash says. serialised: the Rust
    tokenizer as JSON."""

    least: int
    most: int
    serialised: str

    def maker(self) -> Callable[[Document | BadDocument], Conversation | BadDocument]:
        """Of a document, the conversation that is to be answered; of one no longer than its beginning, or one that
        cannot be used, the reason."""
        tokenizer = Tokenizer.from_str(self.serialised)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # those spelled out in a text are plain text

        def make(document: Document | BadDocument) -> Conversation | BadDocument:
            if isinstance(document, BadDocument):
                return document
            count = self.least + int.from_bytes(document.digest[:8], "little") % (self.most - self.least + 1)
            stop = _end_of(count, document.text, tokenizer)
            if not stop:
                return BadDocument(document.name, document.digest, "too_short")
            try:
                messages = check_messages([{"role": "user", "content": document.text[:stop]}], answered=False)
            except Unusable as error:
                return BadDocument(document.name, document.digest, error.why)
            return Conversation(document.name, messages_digest(messages), messages)

        return make


def _end_of(count: int, text: str, tokenizer: Tokenizer) -> int:
    """Where the text's first `count` tokens end, in characters; where these are a part of its first character, the end
    of that. 0 where nothing stands behind them."""
    size = MOST_CHARACTERS * (count + 1)
    while True:
        offsets = tokenizer.encode(text[:size], add_special_tokens=False).offsets
        behind = [begin for begin, _ in offsets[count:] if begin > 0]
        if size >= len(text):
            return behind[0] if behind else 0
        if len(behind) > 1:  # the last token may be half of one
            return behind[0]
        size *= 2  # a text of long tokens: blanks, lines of signs
