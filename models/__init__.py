"""GPT-2, TransformerLM, translation, classifiers, generation. Import as `tensorgrad.models`."""

if __name__ != "tensorgrad.models":
    raise ImportError("`models` is the package tensorgrad.models: `from tensorgrad import models`")
