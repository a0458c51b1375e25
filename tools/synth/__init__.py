"""Random GGUF files of any shape that the pin's qwen35 and qwen35moe graphs take. Entry: tools/synth_gguf.py.

spec.py says what can be asked for, vocab.py makes the tokenizer, layout.py lists the tensors, blocks.py draws
their bytes, writer.py puts them into a file. None of it knows the native library.
"""
