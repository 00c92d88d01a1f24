"""The reference engine: a tiny language model behind the control surface of SGLang 0.5.23, or of vLLM 0.32.

It exists so that the real adapter, gate and router can be driven against something that really generates from the
weights it holds, many times per machine, with the same status codes and quirks as the real engine.
"""
