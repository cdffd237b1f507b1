"""From the tokens, tables, tars, chats or functions that a plan names to the microbatches of a rank."""
