"""What this distribution registers, by group and name. The registry reads the table and imports a part when it is used."""

PARTS = {
    "forge.sources": {
        "store": "forge_data.components:TokenStore",
        "text": "forge_data.components:TextFiles",
        "stdlib": "forge_data.components:Stdlib",
        "tokens": "forge_data.components:Tokens",
        "labeled": "forge_data.components:Labeled",
        "megatron": "forge_data.components:Megatron",
        "llmc": "forge_data.components:Llmc",
        "datatrove": "forge_data.components:Datatrove",
        "jsonl": "forge_data.components:JsonLines",
        "parquet": "forge_data.components:Parquet",
        "arrow": "forge_data.components:Arrow",
        "chat": "forge_data.components:Conversations",
        "exercises": "forge_data.components:Exercises",
        "huggingface": "forge_data.components:HuggingFace",
        "random": "forge_data.components:RandomTokens",
    },
    "forge.tokenizers": {
        "bytes": "forge_data.components:Bytes",
        "bpe": "forge_data.components:Bpe",
        "tiktoken": "forge_data.components:Tiktoken",
        "sentencepiece": "forge_data.components:SentencePiece",
    },
    "forge.checks": {
        "packing_keeps_documents": "forge_data.checks:packing_keeps_documents",
        "phases_fit": "forge_data.checks:phases_fit",
        "files_exist": "forge_data.checks:files_exist",
        "labels_fit": "forge_data.checks:labels_fit",
        "conversations_train": "forge_data.checks:conversations_train",
        "tokenizer_fits": "forge_data.checks:tokenizer_fits",
    },
    "forge.commands": {
        "data": "forge_data.commands.cli:app",
    },
}
