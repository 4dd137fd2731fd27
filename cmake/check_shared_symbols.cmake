# Fails if one of OBJECTS defines a weak or unique symbol (an inline function or a template).
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" -C --defined-only "${object}"
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
  if(shared)
    list(JOIN shared "\n  " text)
    message(FATAL_ERROR "${object} would share code across instruction sets:\n  ${text}")
  endif()
endforeach()
