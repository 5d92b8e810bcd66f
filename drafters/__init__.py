"""One file, one drafter. Imported as `specjax.drafters`: a top-level `drafters` belongs to another project."""

if __name__ != "specjax.drafters":
    raise ImportError(f"import specjax.drafters, not {__name__}: run `python -m pip install -e .` first")
