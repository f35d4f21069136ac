"""What a run does about its failures: it goes back, or its ranks are started again."""
