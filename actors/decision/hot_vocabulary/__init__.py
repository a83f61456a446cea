"""The hot vocabulary of a model: the tokens that are looked at first, and how many of them pay."""

from lexshard.actors.decision.hot_vocabulary.file import (
    FILE_NAME,
    HotFile,
    read_hot_file,
    tokenizer_hash,
    write_hot_file,
)
from lexshard.actors.decision.hot_vocabulary.measurement import synthetic_decide
from lexshard.actors.decision.hot_vocabulary.vocabulary import Decide, HotVocabulary

__all__ = [
    "FILE_NAME",
    "Decide",
    "HotFile",
    "HotVocabulary",
    "read_hot_file",
    "synthetic_decide",
    "tokenizer_hash",
    "write_hot_file",
]
