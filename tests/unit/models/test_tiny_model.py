"""The tiny model directory that other tests start from."""

import transformers


def test_transformers_loads_the_directory_and_its_tokenizer(tiny_model):
    path = tiny_model(vocab=32)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.config.num_hidden_layers == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("12+(3*4)=?")
    assert len(ids) == 10
    assert tokenizer.decode(ids) == "12+(3*4)=?"
    assert tokenizer.eos_token_id == 1
