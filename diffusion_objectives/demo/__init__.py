"""The library's main job on real text: `python -m diffusion_objectives.demo`.

A masked-diffusion teacher is trained on text that every Python installation
holds, then two equal, smaller students: one on the data, one distilled from the
teacher on canvases of its own. See `__main__` for the method.
"""
