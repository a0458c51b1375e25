"""Random GGUF files of any shape that the pin's qwen35, qwen35moe and dflash graphs take.

Entry: tools/synth_gguf.py. spec.py says what can be asked for, vocab.py makes the tokenizer, layout.py lists
the tensors, blocks.py draws their bytes, planting.py and routing.py give some of them a meaning, target.py
and dflash.py are the two kinds of models, writer.py puts one into a file. None knows the native library.
"""
