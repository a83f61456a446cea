"""Steps that follow one another before what the first of them led to is booked."""
