#!/usr/bin/env bash
# Undertow never resumes by date: the Last-Modified that it sent itself does not match in
# If-Range, and does match in If-Modified-Since.
#
# Version: io.undertow:undertow-core 2.3.18.Final on Java 17.
# Why it surprises: its ResourceHandler sends no ETag by default, so the date is all that
# a client has to continue a download with. Each file that was written the usual way has
# a time with a fraction of a second. The header has none, the comparison has, and so the
# answer is 200 with everything, each time, as if the file had changed. Files made by
# `touch -d`, or unpacked from a zip, have whole seconds, and for them it works.
# Source: undertow, core/src/main/java/io/undertow/util/ByteRange.java,
# getResponseResult(): it compares the date of If-Range with the milliseconds of
# PathResource.getLastModified(). DateUtils.handleIfModifiedSince(), in the same package,
# adds 999 ms for that reason.
#
# Output seen:
#   time with 0 ms: If-Modified-Since 304, If-Range 206 with 1000 bytes
#   time with 123 ms: If-Modified-Since 304, If-Range 200 with 3000 bytes
#
# With Java 11 or later, Maven and a network for it. It fails when that has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >pom.xml <<'END'
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>findings</groupId><artifactId>undertow</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>io.undertow</groupId><artifactId>undertow-core</artifactId>
    <version>2.3.18.Final</version>
  </dependency></dependencies>
</project>
END
timeout 300 mvn -q -B dependency:copy-dependencies -DoutputDirectory=lib >log 2>&1 ||
    { cat log && exit 1; }

cat >Ask.java <<'END'
import io.undertow.Undertow;
import io.undertow.server.handlers.resource.*;
import java.net.*;
import java.net.http.*;
import java.nio.file.*;
import java.nio.file.attribute.FileTime;

public class Ask {
    static HttpResponse<byte[]> get(URI uri, String... headers) throws Exception {
        var request = HttpRequest.newBuilder(uri);
        if (headers.length > 0) request.headers(headers);
        return HttpClient.newHttpClient().send(request.build(), HttpResponse.BodyHandlers.ofByteArray());
    }

    public static void main(String[] arguments) throws Exception {
        Path file = Files.write(Files.createDirectory(Path.of("www")).resolve("file"), new byte[3000]);
        var files = new ResourceHandler(new PathResourceManager(file.getParent()));
        var server = Undertow.builder().addHttpListener(0, "127.0.0.1").setHandler(files).build();
        server.start();
        int port = ((InetSocketAddress) server.getListenerInfo().get(0).getAddress()).getPort();
        URI uri = URI.create("http://127.0.0.1:" + port + "/file");
        for (long ms : new long[] {0, 123}) {
            Files.setLastModifiedTime(file, FileTime.fromMillis(1577836800000L + ms));
            String date = get(uri).headers().firstValue("Last-Modified").get();
            int since = get(uri, "If-Modified-Since", date).statusCode();
            var part = get(uri, "Range", "bytes=1000-1999", "If-Range", date);
            System.out.printf("time with %d ms: If-Modified-Since %d, If-Range %d with %d bytes%n",
                ms, since, part.statusCode(), part.body().length);
        }
        System.exit(0);
    }
}
END
timeout 120 java -cp 'lib/*' Ask.java 2>log | tee seen
cat >wanted <<'END'
time with 0 ms: If-Modified-Since 304, If-Range 206 with 1000 bytes
time with 123 ms: If-Modified-Since 304, If-Range 200 with 3000 bytes
END
diff wanted seen
