"""From records to tokens: a corpus into a token store by many workers, or record by record during a run."""
