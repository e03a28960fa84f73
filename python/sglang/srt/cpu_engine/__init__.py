"""Makes upstream's server start and run on a machine without an accelerator.

`bootstrap` runs while `sglang` is being imported and uses the standard library only: `detect` looks for an
accelerator, and where there is none the CPU engine is chosen and `portable` stands ready to serve the name
`sgl_kernel`. `defaults` runs when a server or engine is launched. What they set, and when they leave things alone,
is in `docs/cpu.md`.
"""
