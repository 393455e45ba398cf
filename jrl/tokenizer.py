"""Text to token ids and back, with SentencePiece.

The built-in tasks train a character model from the characters they use, in milliseconds; a user's
`.model` file (character, BPE or unigram) is loaded as it is. Beginning and end of sequence are
never added here: whoever lays out a batch knows where they belong.
"""

import io
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

# The ids of a character model; a user's file brings its own.
PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3

# SentencePiece writes a space as this character, so a text that has both would come back changed.
SPACE_PIECE = "\u2581"

# What a trained model could not give back: the space as above, the mark of an unknown, the mark
# between two training texts, the end of a C string. (Lone surrogates are no characters at all.)
SPOILT = SPACE_PIECE + "\u2585\x1f\0"


class Tokenizer:
    """Maps text to token ids with a SentencePiece model.

    Attributes:
      vocab_size: number of ids, special ones included.
      pad_id: the id that fills unused positions.
      bos_id: the id that begins a sequence.
      eos_id: the id that ends a sequence.
      unk_id: the id of what the model does not know; `encode` never returns it.
    """

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int

    def __init__(self, model: bytes):
        """Loads a serialised SentencePiece model.

        A model without a padding id pads with its unknown id: `encode` refuses what would become
        unknown, so that id never occurs in a text. A model without a beginning of sequence begins
        with its end of sequence, which marks the same border between two texts.

        Args:
          model: the bytes of a `.model` file.

        Raises:
          ValueError: the bytes are no SentencePiece model, or it has no end of sequence.
        """
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(
                f"model of {len(model)} bytes is not a SentencePiece model: "
                "give the .model file that spm_train wrote"
            ) from error
        if processor.eos_id() < 0:
            raise ValueError(
                "model has no end-of-sequence id, and responses could not end: "
                "train it with an eos_id of 0 or more"
            )
        self._model = model
        self._processor = processor
        self.vocab_size = processor.vocab_size()
        self.unk_id = processor.unk_id()
        self.eos_id = processor.eos_id()
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else self.eos_id
        self.pad_id = processor.pad_id() if processor.pad_id() >= 0 else self.unk_id
        self._special = {self.pad_id, self.bos_id, self.eos_id, self.unk_id}

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Loads a `.model` file, or what the tokenizer of a checkpoint saved.

        Args:
          path: where the file is.

        Raises:
          ValueError: there is no such file, or it is no usable SentencePiece model.
        """
        path = Path(path)
        try:
            model = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read ({error.strerror}): "
                "give the path of a SentencePiece .model file"
            ) from error
        try:
            # A SentencePiece model never begins with a brace.
            if model.startswith(b"{"):
                from jrl.json_tokenizer import JsonTokenizer  # needs an extra

                return JsonTokenizer(json.loads(model))
            return cls(model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def train_characters(cls, characters: str) -> "Tokenizer":
        """Trains a model in which each character is one token and nothing is normalised.

        Decoding an encoded text gives it back exactly, blanks and line ends included. The same
        characters, in any order, give the same bytes.

        Args:
          characters: what the texts are made of; order and repetitions do not matter.

        Returns:
          A tokenizer with ids 0 to 3 for padding, beginning, end and unknown.

        Raises:
          ValueError: there is no character, nothing but line ends, or a character that
            SentencePiece cannot give back.
        """
        alphabet = sorted(set(characters))
        if not set(alphabet) - {"\n", "\r"}:
            raise ValueError(
                f"characters={characters!r} has nothing to train on: "
                "give every character that the texts can contain"
            )
        for character in alphabet:
            if character in SPOILT or "\ud800" <= character <= "\udfff":
                raise _unfit(character)
        sentence = "".join(alphabet + alphabet[::-1])  # twice: a line end at the end would be lost
        output = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([sentence]),
            max_sentence_length=64 + 8 * len(alphabet),  # bytes; a longer one would be left out
            model_writer=output,
            model_type="char",
            vocab_size=len(alphabet) + 4,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            character_coverage=1.0,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            minloglevel=2,
        )
        tokenizer = cls(output.getvalue())
        for character in alphabet:
            ids = tokenizer.encode(character)
            if len(ids) != 1 or tokenizer.decode(ids) != character:
                raise _unfit(character)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Turns text into ids, without beginning or end of sequence.

        Args:
          text: any string over the model's characters.

        Raises:
          ValueError: the model has no piece for a character of `text`.
        """
        ids = self._processor.encode(text, out_type=int)
        unknown = SPACE_PIECE if SPACE_PIECE in text else None
        if unknown is None and self.unk_id in ids:
            # An unknown piece is spelled as the text that it stands for.
            unknown = self._processor.encode(text, out_type=str)[ids.index(self.unk_id)][0]
        if unknown is not None:
            raise ValueError(
                f"text has the character {unknown!r} (U+{ord(unknown):04X}), which is not "
                f"among the {self.vocab_size} pieces of the tokenizer: train it on "
                "characters that include this one, or give a .model trained with byte_fallback"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Turns ids into text; special ids give nothing, and none of them stops it.

        Args:
          ids: each in [0, vocab_size).

        Raises:
          ValueError: an id lies outside of the vocabulary.
        """
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"ids has {token}, outside of the vocabulary of {self.vocab_size}: "
                    "decode with the tokenizer that the model was trained with"
                )
        return self._processor.decode([token for token in ids if token not in self._special])

    def save(self, path: str | Path) -> None:
        """Writes the `.model` file; a reader sees the old file or the whole new one.

        Args:
          path: where to write it; its folder must exist.
        """
        write_whole(Path(path), self._model)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old one or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _unfit(character: str) -> ValueError:
    return ValueError(
        f"characters has {character!r} (U+{ord(character):04X}), which SentencePiece uses itself "
        "or cannot keep: replace it in the data"
    )
