"""Models in GGUF, computed by llama.cpp through llama-cpp-python.

B batch, T tokens, V vocabulary.
"""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.choices import check_option
from minigpt.engines.engine import Engine, StepFunction, check_exists, load_package, naming_option
from minigpt.engines.gguf_file import Metadata
from minigpt.errors import CheckpointError, ConfigError

LONGEST_CONTEXT = 4096  # tokens for which a cache is made, where the caller does not say how many
CACHE_TYPES = {  # GGML's words, and their numbers in its files
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
FLASH_ATTENTION = {"off": 0, "on": 1, "auto": -1}
OF_CONTEXT = {  # of llama_context_params
    "n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "offload_kqv", "op_offload", "swa_full",
}  # fmt: skip
OF_MODEL = {"n_gpu_layers", "check_tensors", "use_extra_bufts"}  # of llama_model_params
ERROR = 4  # the level of llama.cpp's messages about errors

_said: list[str] = []  # what llama.cpp has said of errors since a file was opened
_keep_log: list[Any] = []  # the function that llama.cpp calls, which must live as long as the process


def gguf(file: str | Path, **options: Any) -> "LlamaCppModel":
    """Return the causal language model of a GGUF file: a candidate, ids (B, T) -> logits (B, T, V).

    Ids go in as they are: no beginning-of-text token is added, and no template of the file is read. Tokens are judged
    one by one too.

    Args:
        file: the path.
        options: in llama.cpp's words: type_k and type_v, the types of the cache ("f32", "f16", "bf16", "q8_0" and so
            on); flash_attn (False, True or "auto"); n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch,
            n_gpu_layers, offload_kqv, op_offload, swa_full, check_tensors, use_extra_bufts. n_ctx is the file's
            context by default, at most 4,096. flash_attn is False by default, as in llama-cpp-python.

    Raises:
        ConfigError: if llama-cpp-python is not installed, or an option is not one of these.
        CheckpointError: if llama.cpp cannot open the file, or it holds no causal language model.
    """
    return LlamaCppModel(file, options)


class LlamaCppModel(Engine):
    """A GGUF file in llama.cpp; ``gguf`` describes the arguments.

    llama.cpp's own functions are called, and not llama-cpp-python's ``Llama``, which makes a template for chats of
    what the file says.
    """

    def __init__(self, file: str | Path, options: Mapping[str, Any]) -> None:
        self.lib = lib = load_package("llama_cpp", "gguf", needs="llama-cpp-python")
        super().__init__(check_exists(file), "llama-cpp-python", "llama.cpp")
        with self.opening():
            Metadata(self.file)
        _listen(lib)
        of_model = lib.llama_model_default_params()
        how = lib.llama_context_default_params()
        how.flash_attn_type = FLASH_ATTENTION["off"]
        for name, value in options.items():
            set_option(of_model, how, name, value)
        self.model = self._made(lib.llama_model_load_from_file(str(self.file).encode(), of_model))
        weakref.finalize(self, lib.llama_model_free, self.model)
        if lib.llama_model_has_encoder(self.model) or not lib.llama_model_has_decoder(self.model):
            raise CheckpointError(f"{self.file} holds no causal language model")
        trained = lib.llama_model_n_ctx_train(self.model)
        if "n_ctx" not in options:
            how.n_ctx = LONGEST_CONTEXT
        how.n_ctx = min(how.n_ctx, trained)  # it aborts beyond what was trained
        how.n_batch = min(how.n_batch, how.n_ctx)
        self.ctx = self._made(lib.llama_init_from_model(self.model, how))
        weakref.finalize(self, lib.llama_free, self.ctx)
        self.batch = lib.llama_batch_init(how.n_batch, 0, 1)
        weakref.finalize(self, lib.llama_batch_free, self.batch)
        self.context, self.n_batch = how.n_ctx, how.n_batch
        self.width: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.vocab_size = self.width
        self.settings = {
            "type_k": _name_of(CACHE_TYPES, how.type_k),
            "type_v": _name_of(CACHE_TYPES, how.type_v),
            "flash_attn": _name_of(FLASH_ATTENTION, how.flash_attn_type),
            "n_threads": how.n_threads,
        }
        for name, value in options.items():
            self.settings.setdefault(name, value)

    def _made(self, pointer: Any) -> Any:
        """Return what llama.cpp made, if it did."""
        if not pointer:
            why = " ".join(" ".join(_said).split()) or "it gives no reason"
            raise CheckpointError(f"llama.cpp cannot open {self.file}: {why:.300}")
        return pointer

    def _whole(self, ids: list[int]) -> np.ndarray:
        return self._start(ids)(ids)

    def _start(self, ids: list[int]) -> StepFunction:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
        read = 0

        def step(ids: list[int]) -> np.ndarray:
            nonlocal read
            pieces = []
            for begin in range(0, len(ids), self.n_batch):
                piece = ids[begin : begin + self.n_batch]
                pieces.append(self._logits(piece, read))
                read += len(piece)
            return np.concatenate(pieces)

        return step

    def _logits(self, ids: list[int], begin: int) -> np.ndarray:
        """Return the logits (T, V) of at most ``n_batch`` tokens, of which the first has the position ``begin``."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place] = token
            batch.pos[place] = begin + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = True
        _said.clear()
        status = self.lib.llama_decode(self.ctx, batch)
        if status != 0:
            why = " ".join(_said) or f"llama_decode returned {status}"
            raise CheckpointError(f"llama.cpp cannot read a text of {len(ids)} tokens with {self.file}: {why:.300}")
        logits = self.lib.llama_get_logits(self.ctx)
        return np.ctypeslib.as_array(logits, (len(ids), self.width)).copy()


def set_option(of_model: Any, of_context: Any, name: str, value: Any) -> None:
    """Set an option where llama.cpp has it.

    Raises:
        ConfigError: if there is none of that name, or it cannot have that value.
    """
    if name in ("type_k", "type_v"):
        check_option(name, value, list(CACHE_TYPES))
        value = CACHE_TYPES[value]
    elif name == "flash_attn":
        word: Any = {True: "on", False: "off"}.get(value, value)
        check_option(name, word, list(FLASH_ATTENTION))
        name, value = "flash_attn_type", FLASH_ATTENTION[word]
    elif name not in OF_CONTEXT | OF_MODEL:
        raise ConfigError("is no option of llama.cpp that is set here", argument=name)
    with naming_option(name, value):
        setattr(of_model if name in OF_MODEL else of_context, name, value)


def _name_of(words: Mapping[str, int], number: int) -> str:
    """Return llama.cpp's word for a number."""
    for word, known in words.items():
        if known == number:
            return word
    return str(number)


def _listen(lib: Any) -> None:
    """Let llama.cpp say what is wrong to us, in place of a page of messages on standard error."""
    _said.clear()
    if _keep_log:
        return

    def hear(level: int, text: bytes, _: object) -> None:
        if level == ERROR:
            _said.append(text.decode(errors="replace"))

    _keep_log.append(lib.llama_log_callback(hear))
    lib.llama_log_set(_keep_log[0], None)
    lib.llama_backend_init()
