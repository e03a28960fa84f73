"""Serve a model with and without speculation, side by side, and show what speculation changed.

``python -m sglang.verify_demo --model-path TARGET --draft-path DRAFT`` starts the real server twice, sends
the same prompts through the OpenAI API and prints whether the tokens agree, how long the accepted runs
are and where the time of a cycle goes. Nothing here is imported by the server.
"""
